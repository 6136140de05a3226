"""mpirun of another MPI, first on PATH and as the launcher: really, from the registry. Horovod is on Open MPI 4."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.doctor import look, on_path
from tests.support.mpis import beside, wheel

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def four() -> Path:
    """Where Horovod's Open MPI is."""
    return Path(beside().prefix)


@pytest.mark.parametrize(("name", "says"), [("mpich", "MPICH 5"), ("intelmpi", "Intel(R) MPI Library")])
def test_an_mpi_of_another_family(name: str, says: str) -> None:
    other = Path(wheel(name).mpirun)
    first = on_path(other.parent)
    before = look(environment=first)["mpirun"]
    assert before["level"] == "broken" and says in before["found"]
    under = look(environment=first, before=[str(other), "-np", "2"])["launcher"]
    assert under["level"] == "broken" and under["found"].startswith("hydra, rank 0/2")
    cured = before["mend"].partition("PATH=")[2].partition(":")[0]
    assert look(environment=on_path(Path(cured)))["mpirun"]["level"] == "ok"


def test_open_mpi_5(four: Path) -> None:
    five = Path(wheel("openmpi5").mpirun)
    before = look(environment=on_path(five.parent))
    assert before["mpirun"]["level"] == "warning" and "5.0.11" in before["mpirun"]["found"]
    assert before["horovodrun"]["level"] == "warning" and "--gloo" in before["horovodrun"]["mend"]
    ranks = [str(five), "-np", "2", "--map-by", ":OVERSUBSCRIBE"]
    assert look(environment=on_path(five.parent), before=ranks)["launcher"]["level"] == "ok"
    wrong = look(environment=on_path(five.parent), before=[*ranks, "env", f"LD_LIBRARY_PATH={four}/lib"])
    assert wrong["launcher"]["level"] == "broken"
