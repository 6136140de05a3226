"""Which target starts a job: the one that was asked for, or the one that fits this machine. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from hvdtrain.errors import LaunchError
from hvdtrain.install.record import BUILD_COMMAND
from hvdtrain.install.versions import MPI_NAMES
from hvdtrain.launch.detect import Here
from hvdtrain.launch.spec import Mpi
from hvdtrain.launch.targets import TARGETS

OWN = "hvdtrain"
"""The target that is our own driver: over Gloo, and elastic."""

AUTO = "auto"
OWN_OPTIONS = frozenset(
    {"elastic", "discover", "slots", "restarts", "reset_limit", "hang_timeout", "elastic_timeout", "start_timeout"}
    | {"gloo_timeout", "local", "events", "tag"}
)
"""Options that mean something to our own driver, and to few others."""


@dataclass(frozen=True)
class Choice:
    """A target, the MPI that it is to use, and why it is this one."""

    target: str
    mpi: Mpi | None
    why: str


def has_to_look(to: str, given: Collection[str]) -> bool:
    """Whether the choice depends on what this machine has: to look takes a moment, as programs tell their versions."""
    return to != OWN and not (to == AUTO and OWN_OPTIONS.intersection(given))


def choose(to: str, given: Collection[str], here: Here) -> Choice:
    """Choose.

    Args:
        to: a name of `TARGETS`, `OWN` or `AUTO`.
        given: options that were given.
        here: what this machine has.

    Errors:
        LaunchError: what was asked for cannot be here.
    """
    if to == AUTO:
        return _auto(given, here)
    if to == OWN:
        return Choice(OWN, None, "asked for")
    flavours = TARGETS[to].mpi
    if flavours:
        return Choice(to, _fitting(to, flavours, here), "asked for")
    mpi = _own_mpi(here)
    if to in ("srun", "slurm"):
        return Choice(to, mpi, f"asked for{_over(here)}")
    if to == "horovodrun" and (mpi is None or (mpi.flavour, mpi.major) != ("openmpi", 4)):
        return Choice(to, None, "asked for; over Gloo, for of MPIs it can drive Open MPI 4 alone")
    return Choice(to, mpi, "asked for")


def _auto(given: Collection[str], here: Here) -> Choice:
    own = sorted(OWN_OPTIONS.intersection(given))
    if own:
        return Choice(OWN, None, f"--{own[0].replace('_', '-')} is of our own driver")
    if here.in_slurm and "srun" in here.programs:
        return Choice("srun", _own_mpi(here), f"inside an allocation of Slurm{_over(here)}")
    mpi = _own_mpi(here)
    if mpi is not None:
        return Choice(mpi.flavour, mpi, f"Horovod speaks {name_of(mpi)}")
    if here.family is None:
        return Choice(OWN, None, "Horovod has no MPI: over Gloo")
    found = ", ".join(map(name_of, here.mpis)) or "none"
    return Choice(OWN, None, f"no mpirun of the MPI that Horovod speaks is there (found: {found}): over Gloo")


def _over(here: Here) -> str:
    """What srun's ranks talk by, where it is not their MPI."""
    mpi = _own_mpi(here)
    if mpi is None or here.slurm_mpi_for(mpi):
        return ""
    kinds = ", ".join(here.slurm_mpi) or "none"
    return f"; over Gloo, for srun has no PMI of {name_of(mpi)} (srun --mpi=list: {kinds})"


def name_of(mpi: Mpi) -> str:
    """As in a message: ``Open MPI 4.1.8``."""
    return f"{MPI_NAMES[mpi.flavour]} {mpi.version}"


def _own_mpi(here: Here) -> Mpi | None:
    """The MPI whose ranks Horovod can join."""
    return next((mpi for mpi in here.mpis if _family(mpi) == here.family), None)


def _family(mpi: Mpi) -> str:
    """MPICH and Intel MPI share one binary interface."""
    return "openmpi" if mpi.flavour == "openmpi" else "mpich"


def _fitting(to: str, flavours: tuple[str, ...], here: Here) -> Mpi:
    names = " or ".join(MPI_NAMES[flavour] for flavour in flavours)
    found = next((mpi for mpi in here.mpis if mpi.flavour in flavours), None)
    others = ", ".join(f"{name_of(mpi)} ({mpi.mpirun})" for mpi in here.mpis) or "no mpirun"
    if found is None:
        raise LaunchError(
            f"--to {to} needs mpirun of {names}.",
            expected=f"mpirun of {names} on PATH",
            found=others,
            next_step="load the module of that MPI, or leave --to away: what fits this machine is taken",
        )
    if here.horovod and here.family not in (_family(found), "unknown"):
        speaks = {None: "no MPI", "openmpi": "Open MPI"}.get(here.family, "MPICH or Intel MPI")
        raise LaunchError(
            f"Horovod speaks another MPI than {name_of(found)}: ranks that this starts do not find each other.",
            expected=f"a Horovod that speaks {names}",
            found=f"one that speaks {speaks}",
            next_step=f"{BUILD_COMMAND}, with {found.mpirun}'s mpicxx first on PATH; or leave --to away",
        )
    return found
