"""The command line that starts a job on this machine: horovodrun, or mpirun where horovodrun cannot serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.errors import LaunchError
from hvdtrain.install.versions import MpiBuild

ROOT_MAY_RUN = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


REMOTE_SHELL = ("OMPI_MCA_plm_rsh_agent", "PRTE_MCA_plm_ssh_agent")
"""Variables that name to Open MPI 4 and 5 what is to be taken for ssh."""
NO_SHELL = "/bin/false"


def without_ssh(flavour: str, major: int) -> dict[str, str]:
    """What an MPI needs to start ranks on this host where there is neither ssh nor rsh.

    Open MPI 4 starts nothing then (its issue 12386). Open MPI 5.0.11 was seen to give this host no more slots than it
    has cores, whatever ``--host`` says. Both are content with a program that is there, as they never call it.
    """
    return {REMOTE_SHELL[major >= 5]: NO_SHELL} if flavour == "openmpi" else {}


@dataclass(frozen=True)
class Launch:
    """What to run: programs are named as found on the environment's PATH."""

    argv: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    reason: str | None = None
    """Why it is not horovodrun."""


def launch(
    mpi: MpiBuild | None, ranks: int, program: Sequence[str], is_root: bool, *, remote_shell: bool = True
) -> Launch:
    """Choose the launcher.

    Args:
        mpi: the MPI that Horovod was built for, as its mpirun tells; None when there is none.
        ranks: how many processes.
        program: what each of them runs.
        is_root: Open MPI refuses root unless told twice.
        remote_shell: whether mpirun finds ssh or rsh.

    Raises:
        LaunchError: no MPI, or not a number of ranks.
    """
    if ranks < 1:
        raise LaunchError("A job has at least one rank.", expected="NP=1 or more", found=f"NP={ranks}")
    if mpi is None:
        raise LaunchError(
            "There is no MPI to start ranks with.",
            expected="mpirun of Open MPI, MPICH or Intel MPI, on PATH or in the environment",
            next_step="make setup   (or start one process without MPI: python -m hvdtrain)",
        )
    root = tuple(ROOT_MAY_RUN.items()) if is_root else ()
    alone = () if remote_shell else tuple(without_ssh(mpi.flavour, mpi.major).items())
    if mpi.flavour != "openmpi":
        return Launch(("mpirun", "-np", str(ranks), *program), (), f"horovodrun is not used with {mpi}: using mpirun")
    if mpi.major >= 5:
        flags = ("--map-by", ":OVERSUBSCRIBE", "--bind-to", "none")
        reason = f"horovodrun cannot drive {mpi}, which takes its options for the program: using mpirun"
        return Launch(("mpirun", "-np", str(ranks), *flags, *program), root + alone, reason)
    return Launch(("horovodrun", "-np", str(ranks), *program), alone)
