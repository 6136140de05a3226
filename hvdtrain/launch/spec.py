"""A job, told once: what each rank runs, how many there are and where. Each of `targets` makes its own start of it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hvdtrain.install.versions import MpiBuild
from hvdtrain.launch.hosts import LOCAL_NAMES

PYTHON = ("python", "python3")


class Shell(str):
    """A word that a shell is to expand: it stands in a script as it is, all others are quoted."""

    __slots__ = ()


def join(words: Iterable[str]) -> str:
    """Write words as a shell reads them."""
    return " ".join(word if isinstance(word, Shell) else shlex.quote(word) for word in words)


@dataclass(frozen=True)
class Mpi(MpiBuild):
    """An MPI that starts ranks.

    Attributes:
        mpirun: its launcher.
        prefix: its folder, where mpirun must be given that: an MPI from a Python wheel.
    """

    mpirun: str = "mpirun"
    prefix: str | None = None


@dataclass(frozen=True)
class Batch:
    """What a scheduler is asked for besides nodes and ranks.

    Attributes:
        time_s: limit of the job's time; None for the site's.
        queue: partition of Slurm, queue of PBS and LSF, local queue of Kubernetes' Kueue.
        account: who pays.
        array: indices of the jobs of an array, such as ``0-3``.
        notice_s: how long before the limit the ranks are told to save and stop.
        requeues: how often at most the job puts itself back into the queue.
        directives: further lines for the scheduler, as its manual has them: ``--constraint=a100``.
        image: what containers run.
        namespace: of Kubernetes.
        setup: lines of shell that come before the ranks: modules, conda.
        jsrun: whether LSF gives whole hosts, on which jsrun starts the ranks.
    """

    time_s: int | None = None
    queue: str | None = None
    account: str | None = None
    array: str | None = None
    notice_s: int = 120
    requeues: int = 20
    directives: tuple[str, ...] = ()
    image: str | None = None
    namespace: str | None = None
    setup: tuple[str, ...] = ()
    jsrun: bool = False


@dataclass(frozen=True)
class JobSpec:
    """A job.

    Attributes:
        arguments: of ``python -m hvdtrain``, or a program and its arguments.
        ranks: how many processes.
        nodes: on how many hosts.
        hosts: slots by host where hosts are named; a scheduler gives others.
        host: name of the one that starts it.
        python: the interpreter on all hosts.
        gpus_per_node: GPUs of each host that the job uses.
        cpus_per_rank: cores of each rank; 0 where nothing was said.
        elastic: least and most ranks of a job that goes on when some are gone.
        discover: script that tells the hosts of an elastic job.
        folder: where ranks work, on all hosts.
        name: of the job.
        pass_on: names of variables that ranks on other hosts get as they are here. Never their values.
        interface: network interface between hosts; "" leaves it to the launcher.
        ssh_port, ssh_options: of ssh to other hosts; options are whole arguments.
        mpi: what Horovod speaks and the launcher is part of; None over Gloo.
        slurm_mpi: how srun is to connect that MPI: pmix, pmi2, or "" where it cannot, so that Gloo has to.
        is_program: whether `arguments` begin with a program.
        is_root: Open MPI refuses root unless told twice.
        remote_shell: whether mpirun finds ssh or rsh here.
        batch: for schedulers.
    """

    arguments: tuple[str, ...]
    ranks: int
    nodes: int = 1
    hosts: Mapping[str, int] = field(default_factory=dict)
    host: str = "localhost"
    python: str = "python"
    gpus_per_node: int = 0
    cpus_per_rank: int = 0
    elastic: tuple[int, int] | None = None
    discover: str | None = None
    folder: str = "."
    name: str = "hvdtrain"
    pass_on: tuple[str, ...] = ()
    interface: str = ""
    ssh_port: int | None = None
    ssh_options: tuple[str, ...] = ()
    mpi: Mpi | None = None
    slurm_mpi: str = ""
    is_program: bool = False
    is_root: bool = False
    remote_shell: bool = True
    batch: Batch = Batch()

    @property
    def program(self) -> tuple[str, ...]:
        """What each rank runs. A program named python is the interpreter that hvdtrain is installed for."""
        if not self.is_program:
            return (self.python, "-m", "hvdtrain", *self.arguments)
        first, *rest = self.arguments
        return (self.python if first in PYTHON else first, *rest)

    @property
    def ranks_per_node(self) -> int:
        """Ranks of each host, where all have as many."""
        return -(-self.ranks // self.nodes)

    @property
    def remote(self) -> bool:
        """Whether there are ranks on other hosts than the one that starts it."""
        return self.nodes > 1 or any(name not in (*LOCAL_NAMES, self.host) for name in self.hosts)

    @property
    def ssh_arguments(self) -> tuple[str, ...]:
        """What ssh gets besides the host."""
        return (*(("-p", str(self.ssh_port)) if self.ssh_port else ()), *self.ssh_options)


@dataclass(frozen=True)
class Command:
    """A start by a command line.

    Attributes:
        argv: the program and its arguments.
        variables: what its environment gets besides that of this process; no secrets.
    """

    argv: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """As a line of shell."""
        given = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return " ".join([*given, join(self.argv)])


@dataclass(frozen=True)
class Script:
    """A start by a text that a scheduler is given.

    Attributes:
        text: all of it.
        submit: what reads it from its standard input.
    """

    text: str
    submit: tuple[str, ...]

    def __str__(self) -> str:
        """The text."""
        return self.text.removesuffix("\n")
