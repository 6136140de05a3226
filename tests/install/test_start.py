"""How `make train` starts the job: by horovodrun, or by mpirun where horovodrun cannot serve."""

from __future__ import annotations

import pytest

from hvdtrain.errors import LaunchError
from hvdtrain.install.launcher import ROOT_MAY_RUN, launch, without_ssh
from hvdtrain.install.versions import MpiBuild

PROGRAM = ["python", "-m", "hvdtrain", "--train.steps", "5"]


def test_open_mpi_4_is_driven_by_horovodrun() -> None:
    found = launch(MpiBuild("openmpi", "4.1.8"), 3, PROGRAM, is_root=True)
    assert found.argv == ("horovodrun", "-np", "3", *PROGRAM)
    assert found.reason is None


@pytest.mark.parametrize("mpi", [MpiBuild("openmpi", "5.0.11"), MpiBuild("mpich", "4.3.2")])
def test_others_are_driven_by_mpirun_and_it_says_why(mpi: MpiBuild) -> None:
    found = launch(mpi, 3, PROGRAM, is_root=False)
    assert found.argv[:3] == ("mpirun", "-np", "3")
    assert found.argv[-len(PROGRAM) :] == tuple(PROGRAM)
    assert found.environment == ()
    assert found.reason is not None
    assert str(mpi) in found.reason
    assert ("--map-by" in found.argv) == (mpi.flavour == "openmpi")  # more ranks than cores


def test_root_is_allowed_where_open_mpi_would_refuse() -> None:
    found = launch(MpiBuild("openmpi", "5.0.11"), 2, PROGRAM, is_root=True)
    assert dict(found.environment) == {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    assert launch(MpiBuild("mpich", "4.3.2"), 2, PROGRAM, is_root=True).environment == ()


def test_without_ssh_open_mpi_is_told_not_to_look_for_it() -> None:
    found = launch(MpiBuild("openmpi", "4.1.8"), 2, PROGRAM, is_root=True, remote_shell=False)
    assert dict(found.environment) == {"OMPI_MCA_plm_rsh_agent": "/bin/false"}
    assert launch(MpiBuild("openmpi", "4.1.8"), 2, PROGRAM, is_root=True).environment == ()
    found = launch(MpiBuild("openmpi", "5.0.11"), 2, PROGRAM, is_root=True, remote_shell=False)
    assert found.environment == (*ROOT_MAY_RUN.items(), ("PRTE_MCA_plm_ssh_agent", "/bin/false"))
    assert without_ssh("mpich", 4) == {}


def test_what_cannot_be_started_is_named() -> None:
    with pytest.raises(LaunchError, match="make setup"):
        launch(None, 2, PROGRAM, is_root=False)
    with pytest.raises(LaunchError, match="NP=0"):
        launch(MpiBuild("openmpi", "4.1.8"), 0, PROGRAM, is_root=False)
