"""What a target is: a name, what it takes, and the function that makes a start of a job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hvdtrain.errors import LaunchError
from hvdtrain.launch.spec import Command, JobSpec, Script

BY_MPI = frozenset({"hosts", "interface", "ssh_port", "ssh_option", "env"})
"""Options of targets that reach named hosts."""

SCHEDULED = frozenset(
    {"hosts", "nodes", "gpus_per_node", "cpus_per_rank", "time", "queue", "account", "name", "directive", "env"}
)
"""Options of targets that a scheduler gives hosts to; of ``-H`` the counts alone."""


def for_ssh(spec: JobSpec) -> str:
    """What ssh gets, as MPI's launchers take it: one text, which they split where there is a space.

    Errors:
        LaunchError: an argument that would be split.
    """
    split = next((word for word in spec.ssh_arguments if set(word) & set(" \t\n")), None)
    if split is not None:
        raise LaunchError(
            "mpirun cannot hand an argument with a space to ssh.",
            found=repr(split),
            next_step="put it into ~/.ssh/config, or use --to hvdtrain",
        )
    return " ".join(spec.ssh_arguments)


@dataclass(frozen=True)
class Target:
    """A way to start a job.

    Attributes:
        name: of ``--to``.
        summary: for a list of them.
        render: makes the start. Pure.
        takes: options of `hvdtrain launch` that mean something here, besides those that all take.
        mpi: flavours of MPI it starts ranks of; () where it does without.
        even: whether all hosts get as many ranks.
        elsewhere: whether ranks are in an image, whose variables are not those of this process.
    """

    name: str
    summary: str
    render: Callable[[JobSpec], Command | Script]
    takes: frozenset[str]
    mpi: tuple[str, ...] = ()
    even: bool = False
    elsewhere: bool = False
