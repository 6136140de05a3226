"""Which rank this process is; the only reader and writer of ``os.environ`` in the package.

Each launcher tells its ranks who they are by variables of its own: one line of `LAUNCHERS` says which. A process may
hold the variables of several, because launchers are nested: horovodrun inside a Slurm job, mpirun inside srun. The
first line whose signs are there wins, and the lines run from the innermost launcher to the outermost:

1. ``HOROVOD_RANK``: set by ``horovodrun --gloo`` for each rank itself. (horovodrun over MPI calls mpirun.)
2. ``OMPI_COMM_WORLD_RANK``: set by Open MPI's daemon, which may itself be a task of srun.
3. ``MPI_LOCALRANKID``: set by MPICH's and Intel's Hydra, which may have used srun in the same way.
4. ``SLURM_STEP_NUM_TASKS``: set inside an srun step. ``SLURM_PROCID`` alone is no sign: a batch script and an
   salloc shell have it too, and the programs they start are no ranks.
5. ``PMI_RANK`` without any of these is a launcher that we don't know enough of: an error rather than N lonely ranks.

Other launchers, such as torchrun, are recognised only to be refused: `runtime.other_launchers`.
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

LAUNCH_OPTIONS = "HVDTRAIN_LAUNCH_OPTIONS"
"""The options that `hvdtrain launch` got, as a list in JSON: in the environment of its ranks."""

JOB = "HVDTRAIN_JOB"
"""What tells a job of `hvdtrain launch` from all others: in the environment of its ranks, also when they are started
again."""

NO_LAUNCHER = "none"
GLOO_LAUNCHER = "horovod-gloo"


@dataclass(frozen=True)
class RankInfo:
    """Who this process is among those that the launcher started.

    Attributes:
        launcher: the name of a line in `LAUNCHERS`, or "none": no launcher, rank 0 of 1.
        rank: this process, 0 to size - 1.
        size: number of processes.
        local_rank: this process among those of its host.
        local_size: number of processes on this host.
        host: name of this host.
        variables: the environment of this process.
        folder: in which this process was started: what relative paths of its options are relative to.
    """

    launcher: str = NO_LAUNCHER
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    host: str = "localhost"
    variables: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    folder: Path = field(default=Path(), compare=False, repr=False)

    @property
    def one_host(self) -> bool:
        """Whether all ranks are on one host: the same answer on every rank."""
        return self.local_size == self.size

    @property
    def hosts(self) -> int:
        """Number of hosts, if all hold as many ranks as this one; where they don't, ranks answer differently."""
        return -(-self.size // self.local_size)


@dataclass(frozen=True)
class Launcher:
    """The variables by which one launcher tells a process its rank.

    Attributes:
        name: how it is called in messages.
        signs: any of them shows that this launcher started the process.
        rank, size, local_rank, local_size: the variables that hold these numbers.
        node: set where the variable local_size lists all hosts, as in ``2(x3),1``: which entry is ours.
    """

    name: str
    signs: tuple[str, ...]
    rank: str
    size: str
    local_rank: str
    local_size: str
    node: str | None = None


def _line(name: str, rank: str, size: str, local_rank: str, local_size: str) -> Launcher:
    """Describe a launcher of which every variable is a sign."""
    return Launcher(name, (rank, size, local_rank, local_size), rank, size, local_rank, local_size)


_HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID")

LAUNCHERS = (
    _line(GLOO_LAUNCHER, "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    _line("openmpi", *(f"OMPI_COMM_WORLD_{what}" for what in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    Launcher("hydra", ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"), *_HYDRA),
    Launcher("slurm", ("SLURM_STEP_NUM_TASKS",), *_SLURM),
    Launcher("hydra", ("PMI_RANK", "PMI_SIZE"), *_HYDRA),
)


def environ() -> Mapping[str, str]:
    """Copy the environment of this process."""
    return dict(os.environ)


def change_variables(values: Mapping[str, str | None]) -> None:
    """Write into the environment of this process, where libraries read it when they are loaded; None removes."""
    for name, text in values.items():
        if text is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = text


def elastic(environ: Mapping[str, str]) -> bool:
    """Whether a driver of ours started this rank, and goes on without it when it is gone."""
    return VARIABLE in environ


def by_gloo(environ: Mapping[str, str]) -> bool:
    """Whether Gloo carries what the ranks exchange from their CPUs."""
    asked = environ.get("HOROVOD_CPU_OPERATIONS", "").lower()
    return elastic(environ) or (asked == "gloo" if asked else "HOROVOD_RANK" in environ)


def by_srun(environ: Mapping[str, str]) -> bool:
    """Whether this process is in a step of srun, whatever else started it there."""
    return "SLURM_STEP_NUM_TASKS" in environ


def rank_info(environ: Mapping[str, str], host: str | None = None) -> RankInfo:
    """Read which rank this process is from the launcher's variables.

    Args:
        environ: the process's environment.
        host: name of this host; asked from the system when not given.

    Errors:
        LaunchError: a variable of the launcher is missing, not a number, or out of range.
    """
    host = platform.node() if host is None else host
    launcher = next((line for line in LAUNCHERS if any(sign in environ for sign in line.signs)), None)
    if launcher is None:
        return RankInfo(host=host, variables=environ)
    size = _number(environ, launcher, launcher.size, least=1)
    local_size = _local_size(environ, launcher)
    info = RankInfo(
        launcher.name,
        _number(environ, launcher, launcher.rank, below=size),
        size,
        _number(environ, launcher, launcher.local_rank, below=local_size),
        local_size,
        host,
        environ,
    )
    if info.local_size > info.size:
        raise _wrong(launcher, launcher.local_size, f"at most {launcher.size}={size}", str(local_size))
    return info


def horovod_numbers(numbers: Mapping[str, int]) -> dict[str, str]:
    """Variables by which Horovod over Gloo finds its rank, size, local_rank and so on."""
    return {f"HOROVOD_{name.upper()}": str(number) for name, number in numbers.items()}


def launch_options_text(options: Sequence[str]) -> str:
    """What `LAUNCH_OPTIONS` holds."""
    return json.dumps(list(options))


def launch_options(environ: Mapping[str, str]) -> list[str] | None:
    """The options of the `hvdtrain launch` that started this process; None where it was something else."""
    try:
        found = json.loads(environ.get(LAUNCH_OPTIONS, "null"))
    except ValueError:
        return None
    return found if isinstance(found, list) and all(isinstance(option, str) for option in found) else None


def tasks_per_node(text: str) -> list[int]:
    """Read Slurm's counts of tasks: ``2(x3),1`` are three nodes with two each and one with one.

    Errors:
        ValueError: it is something else.
    """
    per_node: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"([1-9][0-9]{0,8})(?:\(x([0-9]{1,6})\))?", part.strip())
        if not found:
            raise ValueError(part)
        per_node += [int(found[1])] * int(found[2] or 1)
    return per_node


def rank_label(info: RankInfo) -> str:
    """Name a rank in a message: ``rank 3/8 on host``."""
    return f"rank {info.rank}/{info.size} on {info.host}"


def _number(
    environ: Mapping[str, str], launcher: Launcher, variable: str, *, least: int = 0, below: int | None = None
) -> int:
    expected = f"a whole number from {least}" + ("" if below is None else f" to {below - 1}")
    text = environ.get(variable)
    if text is None or not re.fullmatch(r"[0-9]{1,9}", text.strip()):
        raise _wrong(launcher, variable, expected, text)
    number = int(text)
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
    return LaunchError(
        f"{launcher.name} started this process, but {variable} does not say what it should.",
        expected=expected,
        found="it is not set" if found is None else repr(found),
        next_step="start it by mpirun, horovodrun or srun; or unset "
        + ", ".join(launcher.signs)
        + " if you set them yourself",
    )
