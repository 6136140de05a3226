"""Choose the target that starts a job: the requested one, or the one that fits this machine. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from hvdtrain.errors import LaunchError
from hvdtrain.install.record import BUILD_COMMAND
from hvdtrain.install.versions import MPI_NAMES
from hvdtrain.launch.detect import Machine
from hvdtrain.launch.spec import Mpi
from hvdtrain.launch.targets import TARGETS

OWN = "hvdtrain"
"""The target that is our own driver: over Gloo, and elastic."""

AUTO = "auto"
OWN_OPTIONS = frozenset(
    {"elastic", "discover", "slots", "restarts", "reset_limit", "hang_timeout", "elastic_timeout", "start_timeout"}
    | {"gloo_timeout", "local", "events", "tag"}
)
"""Options of our own driver; few other targets take them."""


@dataclass(frozen=True)
class Choice:
    """A target, the MPI that it uses, and the reason for the choice."""

    target: str
    mpi: Mpi | None
    why: str


def needs_machine(to: str, given: Collection[str]) -> bool:
    """Check whether the choice depends on this machine: detecting it takes a moment."""
    return to != OWN and not (to == AUTO and OWN_OPTIONS.intersection(given))


def choose(to: str, given: Collection[str], machine: Machine) -> Choice:
    """Choose a target and its MPI.

    Args:
        to: a name of `TARGETS`, `OWN` or `AUTO`.
        given: names of the options on the command line.
        machine: programs of this machine.

    Errors:
        LaunchError: the requested target does not work on this machine.
    """
    if to == AUTO:
        return _auto(given, machine)
    if to == OWN:
        return Choice(OWN, None, "requested")
    flavours = TARGETS[to].mpi
    if flavours:
        return Choice(to, _fitting(to, flavours, machine), "requested")
    mpi = _own_mpi(machine)
    if to in ("srun", "slurm"):
        return Choice(to, mpi, f"requested{_gloo_note(machine)}")
    if to == "horovodrun" and (mpi is None or (mpi.flavour, mpi.major) != ("openmpi", 4)):
        return Choice(to, None, "requested; over Gloo, as horovodrun drives no MPI but Open MPI 4")
    return Choice(to, mpi, "requested")


def _auto(given: Collection[str], machine: Machine) -> Choice:
    own = sorted(OWN_OPTIONS.intersection(given))
    if own:
        return Choice(OWN, None, f"--{own[0].replace('_', '-')} is an option of our own driver")
    if machine.in_slurm and "srun" in machine.programs:
        return Choice("srun", _own_mpi(machine), f"inside an allocation of Slurm{_gloo_note(machine)}")
    mpi = _own_mpi(machine)
    if mpi is not None:
        return Choice(mpi.flavour, mpi, f"Horovod uses {mpi}")
    if machine.family is None:
        return Choice(OWN, None, "Horovod has no MPI: over Gloo")
    found = ", ".join(map(str, machine.mpis)) or "none"
    return Choice(OWN, None, f"there is no mpirun of the MPI that Horovod uses (found: {found}): over Gloo")


def _gloo_note(machine: Machine) -> str:
    """Return a note that srun's ranks use Gloo; "" where they use MPI."""
    mpi = _own_mpi(machine)
    if mpi is None or machine.slurm_mpi_for(mpi):
        return ""
    kinds = ", ".join(machine.slurm_mpi) or "none"
    return f"; over Gloo, as srun has no PMI of {mpi} (srun --mpi=list: {kinds})"


def _own_mpi(machine: Machine) -> Mpi | None:
    """Return the MPI that starts ranks which Horovod can join."""
    return next((mpi for mpi in machine.mpis if _family(mpi) == machine.family), None)


def _family(mpi: Mpi) -> str:
    """Return the family of an MPI: MPICH and Intel MPI share one binary interface."""
    return "openmpi" if mpi.flavour == "openmpi" else "mpich"


def _fitting(to: str, flavours: tuple[str, ...], machine: Machine) -> Mpi:
    names = " or ".join(MPI_NAMES[flavour] for flavour in flavours)
    found = next((mpi for mpi in machine.mpis if mpi.flavour in flavours), None)
    others = ", ".join(f"{mpi} ({mpi.mpirun})" for mpi in machine.mpis) or "no mpirun"
    if found is None:
        raise LaunchError(
            f"--to {to} needs mpirun of {names}.",
            expected=f"mpirun of {names} on PATH",
            found=others,
            next_step="load the module of that MPI, or omit --to: hvdtrain launch chooses what fits this machine",
        )
    if machine.horovod and machine.family not in (_family(found), "unknown"):
        used = {None: "no MPI", "openmpi": "Open MPI"}.get(machine.family, "MPICH or Intel MPI")
        raise LaunchError(
            f"Horovod uses another MPI than {found}: ranks that it starts cannot find each other.",
            expected=f"a Horovod built for {names}",
            found=f"one built for {used}",
            next_step=f"{BUILD_COMMAND}, with {found.mpirun}'s mpicxx first on PATH; or omit --to",
        )
    return found
