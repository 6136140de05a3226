"""Detect this process's rank; the only reader and writer of ``os.environ`` in the package.

A process may have variables of several launchers, as they nest: horovodrun in a Slurm job, mpirun in srun. So the first
line of `LAUNCHERS` with a matching sign wins; lines are ordered from the innermost launcher to the outermost:

1. ``TORCHELASTIC_RUN_ID``: set by torchrun, which mpirun or srun may have started once a host. Its ranks are those of
   an engine that needs no Horovod; for others it is refused.
2. ``HOROVOD_RANK``: set by ``horovodrun --gloo`` per rank. (horovodrun over MPI calls mpirun.)
3. ``OMPI_COMM_WORLD_RANK``: set by Open MPI's daemon, which may itself be a task of srun.
4. ``MPI_LOCALRANKID``: set by MPICH's and Intel's Hydra, which may have used srun in the same way.
5. ``SLURM_STEP_NUM_TASKS``: set inside an srun step. ``SLURM_PROCID`` alone is no sign: batch scripts and salloc shells
   have it too, and the programs that they start are not ranks.
6. ``PMI_RANK`` without any of these: an unknown launcher, and an error instead of N separate jobs of one rank.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.errors import LaunchError
from hvdtrain.runtime.channel import VARIABLE

_EARLY = "HOROVOD_ENABLE_ASYNC_COMPLETION"

LAUNCH_OPTIONS = "HVDTRAIN_LAUNCH_OPTIONS"
"""The variable with the options of `hvdtrain launch`, as a JSON list, for its ranks."""

JOB = "HVDTRAIN_JOB"
"""The variable with the unique id of a job of `hvdtrain launch`, for its ranks; a restart keeps it."""

STOP_ON_USR1 = "HVDTRAIN_STOP_ON_USR1"
"""Set to 1: SIGUSR1 makes training save and stop, as SIGTERM does, instead of save and continue."""

NO_LAUNCHER = "none"
GLOO_LAUNCHER = "horovod-gloo"
TORCHRUN = "torchrun"
ANY_MPI = "any"

ALONE = "HVDTRAIN_ALONE"
"""Set to 1: train in this process alone, although torchrun or a launcher that we do not support started it."""


@dataclass(frozen=True)
class RankInfo:
    """The place of this process among those that the launcher started.

    ``variables`` is the environment of this process. ``folder`` is where it was started: relative paths of its options
    refer to it.
    """

    launcher: str = NO_LAUNCHER  # the name of a line in `LAUNCHERS`, or "none": no launcher, rank 0 of 1
    rank: int = 0  # this process, 0 to size - 1
    size: int = 1
    local_rank: int = 0  # index of this process on its host
    local_size: int = 1  # number of processes on this host
    host: str = "localhost"
    variables: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    folder: Path = field(default=Path(), compare=False, repr=False)

    @property
    def started_by(self) -> Launcher:
        """The line of the launcher in `LAUNCHERS`; without one, a line without variables."""
        return next((line for line in LAUNCHERS if line.name == self.launcher), Launcher(self.launcher, self.launcher))

    @property
    def one_host(self) -> bool:
        """Whether all ranks are on one host: the same value on every rank."""
        return self.local_size == self.size

    @property
    def hosts(self) -> int:
        """Number of hosts, if all have as many ranks as this one; otherwise ranks compute different values."""
        return -(-self.size // self.local_size)


@dataclass(frozen=True)
class Launcher:
    """A launcher, and the variables that it sets."""

    name: str
    command: str  # its programs, for messages
    mpi: str = ""  # family of the MPI that its ranks need, as of `MpiLibrary`; `ANY_MPI` by PMI; "" for none
    signs: tuple[str, ...] = ()  # any of them shows that this launcher started the process
    rank: str = ""  # the variable with this number; the next three likewise
    size: str = ""
    local_rank: str = ""
    local_size: str = ""
    node: str | None = None  # set where local_size lists all hosts, as in ``2(x3),1``: the index of this host


_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_GLOO = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")
_OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{what}" for what in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
_HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID")

LAUNCHERS = (
    Launcher(TORCHRUN, "torchrun", "", ("TORCHELASTIC_RUN_ID",), *_TORCHRUN),
    Launcher(GLOO_LAUNCHER, "horovodrun --gloo", "", _GLOO, *_GLOO),
    Launcher("openmpi", "mpirun", "openmpi", _OPEN_MPI, *_OPEN_MPI),
    Launcher("hydra", "mpirun or mpiexec", "mpich", ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"), *_HYDRA),
    Launcher("slurm", "srun", ANY_MPI, ("SLURM_STEP_NUM_TASKS",), *_SLURM),
    Launcher("hydra", "mpirun or mpiexec", "mpich", ("PMI_RANK", "PMI_SIZE"), *_HYDRA),
)

_SIZES_OF_OTHERS = {
    "WORLD_SIZE": "torchrun",
    "PMI_SIZE": "an MPI launcher",
    "MV2_COMM_WORLD_SIZE": "MVAPICH's mpirun",
    "JSM_NAMESPACE_SIZE": "jsrun",
    "FLUX_JOB_SIZE": "flux run",
}
"""Variables with the number of processes of unsupported launchers, and the launchers' names."""

_RANKS_OF_OTHERS = {"PMIX_RANK": "a PMIx launcher", "PALS_RANKID": "Cray's mpiexec", "ALPS_APP_PE": "aprun"}
"""Variables of launchers that set a rank, but not the number of processes."""


def environ() -> Mapping[str, str]:
    """Return a copy of this process's environment."""
    return dict(os.environ)


def change_variables(values: Mapping[str, str | None]) -> None:
    """Set variables of this process, which libraries read when they are loaded; None removes one."""
    for name, text in values.items():
        if text is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = text


def elastic(environ: Mapping[str, str]) -> bool:
    """Check whether hvdtrain's own driver started this rank."""
    return VARIABLE in environ


def by_gloo(environ: Mapping[str, str]) -> bool:
    """Check whether ranks exchange CPU tensors by Gloo."""
    asked = environ.get("HOROVOD_CPU_OPERATIONS", "").lower()
    return elastic(environ) or (asked == "gloo" if asked else "HOROVOD_RANK" in environ)


def rank_info(environ: Mapping[str, str], host: str | None = None) -> RankInfo:
    """Read this process's rank from the launcher's variables. ``host``: name of this host (default: the system's).

    Errors: LaunchError if a variable of the launcher is missing, not a number, or out of range.
    """
    host = platform.node() if host is None else host
    lines = LAUNCHERS[1:] if environ.get(ALONE) == "1" else LAUNCHERS
    launcher = next((line for line in lines if any(sign in environ for sign in line.signs)), None)
    if launcher is None:
        return RankInfo(host=host, variables=environ)
    size = _number(environ, launcher, launcher.size, least=1)
    local_size = _local_size(environ, launcher)
    rank = _number(environ, launcher, launcher.rank, below=size)
    local_rank = _number(environ, launcher, launcher.local_rank, below=local_size)
    if local_size > size:
        raise _wrong(launcher, launcher.local_size, f"at most {launcher.size}={size}", str(local_size))
    return RankInfo(launcher.name, rank, size, local_rank, local_size, host, environ)


def _unused_launcher(info: RankInfo, *, horovod: bool) -> tuple[str, str] | None:
    """Return the variable that shows an unsupported launcher of several processes, and the launcher's name.

    Each process would train alone, or take the rank of another. None without such a variable, or with `ALONE`.
    """
    variables = info.variables
    if variables.get(ALONE) == "1" or elastic(variables):  # or our agents are tasks of srun
        return None
    if info.size > 1:
        return ("WORLD_SIZE", TORCHRUN) if info.launcher == TORCHRUN and horovod else None
    if info.launcher == TORCHRUN:
        return None
    sizes = _SIZES_OF_OTHERS
    if info.launcher == NO_LAUNCHER and "SLURM_STEP_ID" in variables:
        sizes = {**sizes, "SLURM_NTASKS": "srun"}  # without a step it is the size of the allocation
    for variable, launcher in sizes.items():
        text = variables.get(variable, "").strip()
        if re.fullmatch(r"[0-9]{1,9}", text) and int(text) > 1:
            return variable, launcher
    ranks = _RANKS_OF_OTHERS.items() if info.launcher == NO_LAUNCHER else ()
    return next((found for found in ranks if found[0] in variables), None)


def refuse_unused_launcher(info: RankInfo, *, horovod: bool = True) -> None:
    """Raise LaunchError where a launcher of several processes started this one, but they are not ranks of one job.

    `horovod`: whether the ranks communicate by Horovod, so that torchrun's are not those of one job.
    """
    if (found := _unused_launcher(info, horovod=horovod)) is None:
        return
    variable, launcher = found
    value = info.variables.get(variable, "")
    supported = info.launcher not in (NO_LAUNCHER, TORCHRUN)
    joined = f"{info.size} rank(s) by {info.launcher}" if supported else "no launcher that hvdtrain supports"
    number = value if variable in _SIZES_OF_OTHERS else "N"
    with_torch = "--parallel.engine ddp, which torchrun can start; or " if info.launcher == TORCHRUN else ""
    raise LaunchError(
        f"{launcher} seems to have started this process, but not as a rank of a Horovod job: each process would train"
        " on its own",
        expected="ranks started by hvdtrain launch, horovodrun, mpirun or srun",
        found=f"{variable}={value}, and {joined}",
        next_step=f"{with_torch}hvdtrain launch -np {number} -- OPTIONS, without {launcher}; to train in this process"
        f" alone: {ALONE}=1",
    )


def refuse_early_completion() -> None:
    """Check that Horovod completes an exchange on a GPU before it says so.

    With this variable only the default stream waits for the exchange (the callback of DoAllreduce in Horovod 0.28.1,
    torch/mpi_ops_v2.cc). Training and compressors use others, which would read what is not there yet.

    Errors: LaunchError if the variable is set.
    """
    if (value := os.environ.get(_EARLY, "")) not in ("", "0"):
        raise LaunchError(
            f"with {_EARLY}, gradients on a GPU would be used before their exchange is complete",
            expected="0, or not set",
            found=value,
            next_step=f"unset {_EARLY}",
            everywhere=True,
        )


def horovod_numbers(numbers: Mapping[str, int]) -> dict[str, str]:
    """Return the variables from which Horovod over Gloo reads rank, size, local_rank and so on."""
    return {f"HOROVOD_{name.upper()}": str(number) for name, number in numbers.items()}


def launch_options_text(options: Sequence[str]) -> str:
    """Return the value of `LAUNCH_OPTIONS`."""
    return json.dumps(list(options))


def launch_options(environ: Mapping[str, str]) -> list[str] | None:
    """Return the options of the `hvdtrain launch` that started this process; None without one."""
    try:
        found = json.loads(environ.get(LAUNCH_OPTIONS, "null"))
    except ValueError:
        return None
    return found if isinstance(found, list) and all(isinstance(option, str) for option in found) else None


def tasks_per_node(text: str) -> list[int]:
    """Parse Slurm's counts of tasks: ``2(x3),1`` are three nodes with two each and one with one. Errors: ValueError."""
    per_node: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"([1-9][0-9]{0,8})(?:\(x([0-9]{1,6})\))?", part.strip())
        if not found:
            raise ValueError(part)
        per_node += [int(found[1])] * int(found[2] or 1)
    return per_node


def rank_label(info: RankInfo) -> str:
    """Return the name of a rank for messages: ``rank 3/8 on host``."""
    return f"rank {info.rank}/{info.size} on {info.host}"


def _number(
    environ: Mapping[str, str], launcher: Launcher, variable: str, *, least: int = 0, below: int | None = None
) -> int:
    expected = f"a whole number from {least}" + ("" if below is None else f" to {below - 1}")
    text = environ.get(variable)
    number = int(text) if text is not None and re.fullmatch(r"[0-9]{1,9}", text.strip()) else -1
    if number < least or (below is not None and number >= below):
        raise _wrong(launcher, variable, expected, text)
    return number


def _local_size(environ: Mapping[str, str], launcher: Launcher) -> int:
    if launcher.node is None:
        return _number(environ, launcher, launcher.local_size, least=1)
    node = _number(environ, launcher, launcher.node)
    text = environ.get(launcher.local_size)
    try:
        per_node = tasks_per_node(text or "")
    except ValueError:
        raise _wrong(launcher, launcher.local_size, "tasks per node, such as 2(x3),1", text) from None
    if node >= len(per_node):
        raise _wrong(launcher, launcher.node, f"below the {len(per_node)} nodes of {launcher.local_size}", str(node))
    return per_node[node]


def _wrong(launcher: Launcher, variable: str, expected: str, found: str | None) -> LaunchError:
    signs = ", ".join(launcher.signs)
    return LaunchError(
        f"{launcher.name} started this process, but {variable} is invalid",
        expected=expected,
        found="it is not set" if found is None else repr(found),
        next_step=f"start it by mpirun, horovodrun or srun; or unset {signs} if you set them yourself",
    )
