"""The tests of `hvdtrain.torch` against stock Horovod, in jobs of other launchers and sizes than `make test` has."""

from __future__ import annotations

import pytest

from tests.support.launch import ROOT, run

pytestmark = pytest.mark.slow

FILES = [f"tests/parallel/{name}.py" for name in ("test_drop_in", "test_drop_in_divided", "test_drop_in_misuse")]


@pytest.mark.parametrize(("launcher", "size"), [("mpirun", 1), ("mpirun", 3), ("horovodrun --gloo", 2)])
def test_the_drop_in_does_as_stock_horovod_does(launcher: str, size: int) -> None:
    done = run(["-m", "pytest", "-q", "-p", "no:cacheprovider", *FILES], size=size, launcher=launcher, cwd=ROOT)
    assert "passed" in done.stdout and "no Horovod job" not in done.stdout
