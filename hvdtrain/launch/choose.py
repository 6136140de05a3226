"""Choose the target that starts a job, and refuse jobs that it cannot start as requested. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from hvdtrain.errors import LaunchError
from hvdtrain.install.record import BUILD_COMMAND
from hvdtrain.install.versions import MPI_NAMES
from hvdtrain.launch.detect import NO_PMI, Machine
from hvdtrain.launch.spec import JobSpec, Mpi
from hvdtrain.launch.targets import BY_SRUN, TARGETS
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

    Errors:
        LaunchError: the requested target does not work on this machine.
    """
    in_image = "container" in given
    if to == AUTO:
        return _auto(given, machine)
    if to == OWN:
        return Choice(OWN, None, "requested")
    flavours = TARGETS[to].mpi
    if flavours:
        return Choice(to, _fitting(to, flavours, machine, in_image), "requested")
    if to in ("pbs", "lsf") and in_image and (first := _mpi_for_image(machine)):
        return Choice(to, first, f"requested; {_needs_in_image(first)}")
    if to in BY_SRUN:
        return Choice(to, _srun_mpi(machine, in_image), f"requested{_gloo_note(machine, in_image)}")
    mpi = _own_mpi(machine)
    if to == "horovodrun" and (mpi is None or (mpi.flavour, mpi.major) != ("openmpi", 4)):
        return Choice(to, None, "requested; over Gloo, as horovodrun supports only Open MPI 4")
    return Choice(to, mpi, "requested")


def _auto(given: Collection[str], machine: Machine) -> Choice:
    own = sorted(OWN_OPTIONS.intersection(given))
    if own:
        return Choice(OWN, None, f"--{own[0].replace('_', '-')} is an option of our own driver")
    if machine.in_slurm and "srun" in machine.programs:
        in_image = "container" in given
        why = f"inside an allocation of Slurm{_gloo_note(machine, in_image)}"
        return Choice("srun", _srun_mpi(machine, in_image), why)
    if "container" in given and (first := _mpi_for_image(machine)):
        return Choice(first.flavour, first, _needs_in_image(first))
    mpi = _own_mpi(machine)
    if mpi is not None:
        return Choice(mpi.flavour, mpi, f"Horovod uses {mpi}")
    if machine.family is None:
        return Choice(OWN, None, "Horovod has no MPI: over Gloo")
    found = ", ".join(map(str, machine.mpis)) or "none"
    return Choice(OWN, None, f"there is no mpirun of the MPI that Horovod uses (found: {found}): over Gloo")


def _gloo_note(machine: Machine, in_image: bool) -> str:
    """Return a note that srun's ranks use Gloo; "" where they use MPI."""
    mpi = _srun_mpi(machine, in_image)
    if mpi is None or machine.slurm_mpi_for(mpi):
        return ""
    if machine.pmi:
        return f"; over Gloo, by --pmi {machine.pmi}"
    if mpi.flavour == "intelmpi" and not machine.intel_pmi:
        return f"; over Gloo, as {mpi} needs Slurm's PMI library (export I_MPI_PMI_LIBRARY=/path/to/libpmi2.so)"
    kinds = ", ".join(machine.slurm_mpi) or "none"
    return f"; over Gloo, as srun has no PMI of {mpi} (srun --mpi=list: {kinds})"


def _srun_mpi(machine: Machine, in_image: bool) -> Mpi | None:
    """Return the MPI of ranks that srun starts: it needs no mpirun.

    Errors:
        LaunchError: a PMI was requested for containers, and this machine has no MPI.
    """
    found = _own_mpi(machine) or machine.srun_mpi
    if found is None and in_image and machine.pmi not in ("", NO_PMI):
        found = _mpi_for_image(machine)
        if found is None:
            raise LaunchError(
                f"--pmi {machine.pmi} connects the ranks of an MPI, and this machine has none",
                expected="an MPI on PATH of the same kind as that of the image",
                next_step="load its module; or --pmi none, for Gloo",
            )
    return found


def _own_mpi(machine: Machine) -> Mpi | None:
    """Return the MPI that starts ranks which Horovod can join."""
    return next((mpi for mpi in machine.mpis if _family(mpi) == machine.family), None)


def _mpi_for_image(machine: Machine) -> Mpi | None:
    """Return the MPI for ranks in containers on a machine without Horovod; None if it has Horovod or no MPI."""
    return next(iter(machine.mpis), None) if not machine.horovod else None


def _needs_in_image(mpi: Mpi) -> str:
    return f"there is no Horovod here, and that of the image must be built for {MPI_NAMES[mpi.flavour]}"


def _family(mpi: Mpi) -> str:
    """Return the family of an MPI: MPICH and Intel MPI share one binary interface."""
    return "openmpi" if mpi.flavour == "openmpi" else "mpich"


def _fitting(to: str, flavours: tuple[str, ...], machine: Machine, in_image: bool) -> Mpi:
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
    if machine.horovod and not in_image and machine.family not in (_family(found), "unknown"):
        used = {None: "no MPI", "openmpi": "Open MPI"}.get(machine.family, "MPICH or Intel MPI")
        raise LaunchError(
            f"Horovod uses another MPI than {found}: ranks that it starts cannot find each other.",
            expected=f"a Horovod built for {names}",
            found=f"one built for {used}",
            next_step=f"{BUILD_COMMAND}, with {found.mpirun}'s mpicxx first on PATH; or omit --to",
        )
    return found


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
    if wrong in ("elastic", "discover") and to != OWN and TARGETS[to].mpi:
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
    if to in TARGETS and TARGETS[to].even:
        _refuse_uneven(spec, to)
    if to in TARGETS and "array" in TARGETS[to].takes:
        _refuse_in_queue(spec)
    if spec.gpus_per_node:
        _refuse_gpus(spec, to)
    if spec.container and spec.mpi is None and (to == "pbs" or (to == "lsf" and not spec.batch.jsrun)):
        raise LaunchError(
            f"--to {to} needs an mpirun to start ranks in containers, and found none that Horovod uses",
            expected="an MPI on PATH, of a version that fits the MPI in the image",
            next_step="load the module of that MPI",
        )
    if spec.elastic is not None:
        least, most = spec.elastic
        if not 1 <= least <= spec.ranks <= most:
            raise LaunchError(
                "--elastic is not MIN:MAX with MIN <= -np <= MAX",
                expected=f"1 <= MIN <= -np ({spec.ranks}) <= MAX",
                found=f"{least}:{most}",
            )


def _refuse_gpus(spec: JobSpec, to: str) -> None:
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
    if not spec.cpus_per_rank and (to == "pbs" or (to == "lsf" and spec.batch.jsrun)):
        raise LaunchError(
            f"--to {to} would give each rank one core, which is too little to load data for a GPU",
            expected="the cores of each rank: those of a host divided by its ranks",
            next_step="--cpus-per-rank 8, for example",
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


def _refuse_in_queue(spec: JobSpec) -> None:
    batch = spec.batch
    if batch.time_s is not None and batch.notice_s >= batch.time_s:
        raise LaunchError(
            "--notice is not shorter than the job's time",
            expected=f"--notice below --time ({batch.time_s}s)",
            found=f"--notice {batch.notice_s}s",
        )
    if not batch.array and any("{array}" in word for word in spec.arguments):
        raise LaunchError("{array} has no value", expected="an array of jobs", next_step="--array 0-3; or omit {array}")
    if batch.array and not any("{array}" in word for word in spec.arguments):
        raise LaunchError(
            "all jobs of the array would be the same run",
            expected="{array} in an argument, which becomes the index",
            next_step="... -- --seed {array} --run_dir runs/{array}",
        )
