"""The description of a job: what each rank runs, how many ranks, and where. `targets` render a start from it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hvdtrain.install.versions import MpiBuild
from hvdtrain.launch.hosts import LOCAL_NAMES

PYTHON = ("python", "python3")
PYXIS, APPTAINER, SINGULARITY = ("pyxis", "apptainer", "singularity")
"""What starts containers: Slurm's plugin with enroot, or a program; singularity is the older name of apptainer."""


class Shell(str):
    """A word that a shell must expand: it is not quoted in a script."""

    __slots__ = ()


def join(words: Iterable[str]) -> str:
    """Join words into a line of shell."""
    return " ".join(word if isinstance(word, Shell) else shlex.quote(word) for word in words)


@dataclass(frozen=True)
class Mpi(MpiBuild):
    """An MPI that starts ranks; `prefix`: its folder, where mpirun needs it: an MPI from a Python wheel."""

    mpirun: str = "mpirun"
    prefix: str | None = None


@dataclass(frozen=True)
class Batch:
    """Requests to a scheduler besides nodes and ranks: options of ``hvdtrain launch``, and two facts."""

    time_s: int | None = None
    queue: str | None = None  # partition of Slurm, queue of PBS and LSF, local queue of Kubernetes' Kueue
    account: str | None = None
    mem_mib: int = 0  # memory of each host; 0 for the site's default
    chunk: tuple[str, ...] = ()  # further resources of each host of PBS: ``host_type=a``
    notice_s: int = 120
    requeues: int = 20
    resubmissions: int = 0  # how often a job of PBS or LSF submits itself again
    preflight: bool = False  # whether to check the hosts first, and requeue the job without bad ones
    directives: tuple[str, ...] = ()  # further lines for the scheduler, from its manual: ``--constraint=a100``
    image: str | None = None
    namespace: str | None = None
    resources: tuple[tuple[str, int], ...] = ()  # extended resources of each pod of Kubernetes: ``rdma/ib`` and 1
    setup: tuple[str, ...] = ()  # lines of shell before the ranks start: modules, conda


@dataclass(frozen=True)
class Container:
    """The container of each rank, with its own Python, hvdtrain, Horovod and MPI."""

    image: str  # in the notation of its runtime
    runtime: str  # such as `PYXIS`
    mounts: tuple[str, ...] = ()  # SRC:DST or SRC:DST:ro; the working folder is mounted too
    gpus: bool = False  # whether the ranks use GPUs of NVIDIA
    override: tuple[str, ...] = ()  # names of the host's variables for ranks; with pyxis, also if the image sets them


@dataclass(frozen=True)
class JobSpec:
    """A job."""

    arguments: tuple[str, ...]  # of ``python -m hvdtrain``, or a program and its arguments
    ranks: int
    nodes: int = 1  # number of hosts
    hosts: Mapping[str, int] = field(default_factory=dict)  # slots of named hosts; schedulers choose other hosts
    host: str = "localhost"  # name of the host that starts the job
    python: str = "python"  # the interpreter on all hosts
    gpus_per_node: int = 0  # GPUs of each host that the job uses
    cpus_per_rank: int = 0  # cores of each rank; 0 if not specified
    elastic: tuple[int, int] | None = None  # least and most ranks of a job that continues when ranks are lost
    discover: str | None = None  # script that lists the hosts of an elastic job
    folder: str = "."  # working folder of the ranks, on all hosts
    name: str = "hvdtrain"  # of the job
    pass_on: tuple[str, ...] = ()  # names, never values, of variables that ranks on other hosts get from here
    site_variables: Mapping[str, str] = field(default_factory=dict)  # from the site's profile; no secrets
    interface: str = ""  # network interface between hosts; "" for the launcher's choice
    ssh_port: int | None = None  # of ssh to other hosts
    ssh_options: tuple[str, ...] = ()  # of ssh to other hosts, whole arguments
    mpi: Mpi | None = None  # the MPI of Horovod and the launcher; None over Gloo
    launcher_arguments: tuple[str, ...] = ()  # further arguments of srun or mpirun
    in_step: bool = False  # whether this process is in a step of Slurm, with which its ranks share cores and GPUs
    agents: str = "auto"  # program that starts the agents of our own driver on other hosts
    slurm_mpi: str = ""  # how srun connects that MPI: pmix, pmi2, cray_shasta, or "" where it cannot
    is_program: bool = False  # whether `arguments` start with a program
    is_root: bool = False  # whether the user is root, which Open MPI refuses by default
    remote_shell: bool = True  # whether mpirun finds ssh or rsh here
    batch: Batch = Batch()  # for schedulers
    container: Container | None = None  # None: ranks use the software of the hosts

    @property
    def program(self) -> tuple[str, ...]:
        """The command of each rank, inside its container. Without one, python is the interpreter with hvdtrain."""
        first, *rest = self.arguments if self.is_program else ("python", "-m", "hvdtrain", *self.own_arguments)
        return (self.python if first in PYTHON and self.container is None else first, *rest)

    @property
    def own_arguments(self) -> tuple[str, ...]:
        """The arguments of hvdtrain. Training in a job with GPUs must not fall back to CPUs."""
        names = {word.partition("=")[0] for word in self.arguments}
        if self.gpus_per_node and self.trains and "--parallel.device" not in names:
            return (*self.arguments, "--parallel.device", "cuda")
        if self.gpus_per_node and self.arguments[:1] == ("preflight",) and "--gpus" not in names:
            return (*self.arguments, "--gpus", str(self.gpus_per_node))
        return self.arguments

    @property
    def trains(self) -> bool:
        """Whether the arguments are those of training, not of another command or a program."""
        first = self.arguments[0] if self.arguments else "train"
        return not self.is_program and (first == "train" or first.startswith("-"))

    @property
    def ranks_per_node(self) -> int:
        """Ranks per host, where all hosts have equally many."""
        return -(-self.ranks // self.nodes)

    @property
    def host_list(self) -> str:
        """The hosts as ``a:4,b:4``."""
        return ",".join(f"{host}:{slots}" for host, slots in self.hosts.items())

    @property
    def remote(self) -> bool:
        """Whether there are ranks on other hosts than the one that starts the job."""
        return self.nodes > 1 or bool(self.other_hosts)

    @property
    def other_hosts(self) -> list[str]:
        """The named hosts that are not the one that starts the job."""
        return [name for name in self.hosts if name not in (*LOCAL_NAMES, self.host)]

    @property
    def ssh_arguments(self) -> tuple[str, ...]:
        """Arguments of ssh besides the host."""
        return (*(("-p", str(self.ssh_port)) if self.ssh_port else ()), *self.ssh_options)


@dataclass(frozen=True)
class Command:
    """A start by a command line; `variables` are added to this process's environment; no secrets."""

    argv: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return it as a line of shell."""
        given = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return " ".join([*given, join(self.argv)])


@dataclass(frozen=True)
class Script:
    """A start by a script for a scheduler; the command `submit` reads it from stdin."""

    text: str
    submit: tuple[str, ...]

    def __str__(self) -> str:
        """Return the text."""
        return self.text.removesuffix("\n")
