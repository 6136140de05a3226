"""Choose the target that starts a job, and refuse jobs that it cannot start as requested. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from hvdtrain.errors import LaunchError
from hvdtrain.install.versions import MPI_NAMES
from hvdtrain.launch.detect import Machine, needs_in_image
from hvdtrain.launch.spec import JobSpec, Mpi
from hvdtrain.launch.targets import TARGETS
from hvdtrain.launch.targets.base import BY_MPI, CONTAINER

OWN = "hvdtrain"
"""The target that is our own driver: over Gloo, and elastic."""

AUTO = "auto"
OWN_OPTIONS = frozenset(
    {"elastic", "discover", "slots", "restarts", "reset_limit", "hang_timeout", "elastic_timeout", "start_timeout"}
    | {"gloo_timeout", "agents", "local", "events", "tag"}
)
"""Options of our own driver; few other targets take them."""

COMMON = frozenset({"np", "to", "site", "dry_run"})
"""Options that every target takes."""

OWN_TAKES = (OWN_OPTIONS | BY_MPI) - {"launcher_arg", *CONTAINER}
_ELASTIC = "a dead rank ends an MPI job; elastic jobs use Gloo"


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
    """Choose a target and its MPI. `given`: names of the options on the command line.

    Errors: LaunchError if the requested target does not work on this machine.
    """
    if to == AUTO:
        return _auto(given, machine)
    if to == OWN:
        return Choice(OWN, None, "requested")
    mpi, note = TARGETS[to].choose(machine, "container" in given)
    return Choice(to, mpi, f"requested{note}")


def _auto(given: Collection[str], machine: Machine) -> Choice:
    own = sorted(OWN_OPTIONS.intersection(given))
    if own:
        return Choice(OWN, None, f"--{own[0].replace('_', '-')} is an option of our own driver")
    in_image = "container" in given
    for name, target in TARGETS.items():
        if why := target.auto(machine):
            try:
                mpi, note = target.choose(machine, in_image)
            except LaunchError as error:
                if in_image:
                    raise
                return Choice(OWN, None, f"{why}, and {error.what}: over Gloo")
            return Choice(name, mpi, why + note)
    if in_image and (mpi := machine.mpi_for_image):
        return Choice(mpi.flavour, mpi, needs_in_image(mpi))
    if mpi := machine.own_mpi:
        return Choice(mpi.flavour, mpi, f"Horovod uses {mpi}")
    if machine.family is None:
        return Choice(OWN, None, "Horovod has no MPI: over Gloo")
    found = ", ".join(map(str, machine.mpis)) or "none"
    return Choice(OWN, None, f"there is no mpirun of the MPI that Horovod uses (found: {found}): over Gloo")


def options_of(to: str) -> frozenset[str]:
    """Return the names of the options that a target takes."""
    return COMMON | (OWN_TAKES if to == OWN else TARGETS[to].takes)


def refuse_options(to: str, given: Collection[str]) -> None:
    """Raise LaunchError for an option that the target does not use, instead of ignoring it."""
    wrong = next((option for option in given if option not in options_of(to)), None)
    if wrong is None:
        return
    able = [OWN] if wrong in OWN_TAKES else []
    able += [target.name for target in TARGETS.values() if wrong in target.takes]
    option = "-H" if wrong == "hosts" else f"--{wrong.replace('_', '-')}"
    what = f"--to {to} does not support {option}."
    if wrong in ("elastic", "discover") and to in MPI_NAMES:
        what = f"--to {to} cannot be elastic: {_ELASTIC}."
    raise LaunchError(what, next_step=f"omit {option}, or use " + ", ".join(f"--to {name}" for name in able))


def refuse_container(to: str, given: Collection[str], image: str) -> None:
    """Raise LaunchError where options of containers have no image, or a profile's image would be left out silently."""
    alone = [name for name in ("container_mount", "container_runtime") if name in given and not image]
    if alone:
        raise LaunchError(f"--{alone[0]} is given without an image", next_step="--container IMAGE")
    if image and "container" not in options_of(to) and not (to in TARGETS and TARGETS[to].elsewhere):
        raise LaunchError(
            f"--to {to} cannot start the ranks in a container, as the profile of the site asks for",
            found=image,
            next_step="another --to; or --container none, for the software of the hosts",
        )


def refuse_shape(spec: JobSpec, to: str) -> None:
    """Raise LaunchError where the numbers of ranks, hosts and GPUs do not fit together."""
    slots = sum(spec.hosts.values())
    if spec.hosts and spec.discover is None and slots < spec.ranks:
        raise LaunchError(
            "-np is larger than the number of slots of -H",
            expected=f"-np {slots} at most, or more slots",
            found=f"-np {spec.ranks} and -H {spec.host_list}",
        )
    target = TARGETS.get(to)
    if target is not None and target.even:
        _refuse_uneven(spec, to)
    batch = spec.batch
    if target and "directive" in target.takes and batch.time_s is not None and batch.notice_s >= batch.time_s:
        raise LaunchError(
            "--notice is not shorter than the job's time",
            expected=f"--notice below --time ({batch.time_s}s)",
            found=f"--notice {batch.notice_s}s",
        )
    if spec.gpus_per_node:
        _refuse_gpus(spec)
    if target is not None:
        target.refuse(spec, to)
    if spec.elastic is not None:
        least, most = spec.elastic
        if not 1 <= least <= spec.ranks <= most:
            raise LaunchError(
                "--elastic is not MIN:MAX with MIN <= -np <= MAX",
                expected=f"1 <= MIN <= -np ({spec.ranks}) <= MAX",
                found=f"{least}:{most}",
            )


def _refuse_gpus(spec: JobSpec) -> None:
    """Raise LaunchError where GPUs or cores would be idle. A program may use several GPUs in each rank."""
    divisors = [part for part in range(1, spec.gpus_per_node + 1) if spec.gpus_per_node % part == 0]
    able = divisors if spec.is_program else [spec.gpus_per_node]
    if spec.ranks_per_node not in able:
        raise LaunchError(
            "the ranks do not match the GPUs: each rank uses one GPU",
            expected=f"ranks per host: {', '.join(map(str, able))}",
            found=f"{spec.ranks_per_node} rank(s) per host, --gpus-per-node {spec.gpus_per_node}",
            next_step=f"-np {spec.nodes * spec.gpus_per_node}, or --gpus-per-node {spec.ranks_per_node}",
        )


def _refuse_uneven(spec: JobSpec, to: str) -> None:
    if len(set(spec.hosts.values())) > 1:
        raise LaunchError(
            f"--to {to} needs the same number of ranks on each host",
            expected="-H with equal numbers of slots; only the numbers are used",
            found=spec.host_list,
        )
    if spec.ranks % spec.nodes:
        raise LaunchError(
            "the ranks cannot be divided evenly among the hosts",
            expected=f"a multiple of {spec.nodes}",
            found=f"-np {spec.ranks} on {spec.nodes} hosts",
            next_step=f"-np {spec.nodes * spec.ranks_per_node}, or other --nodes",
        )
