"""The contract of a target: its name, its options, and the function that renders the start of a job."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from hvdtrain.errors import LaunchError
from hvdtrain.launch.detect import Machine, needs_in_image
from hvdtrain.launch.spec import Command, JobSpec, Mpi, Script, join

CONTAINER = frozenset({"container", "container_mount", "container_runtime"})
"""Options of targets that can start ranks in containers."""

BY_MPI = frozenset({"hosts", "interface", "ssh_port", "ssh_option", "env", "launcher_arg"}) | CONTAINER
"""Options of targets that reach named hosts."""

SCHEDULED = frozenset({"hosts", "nodes", "gpus_per_node", "cpus_per_rank", "time", "queue", "account", "name"})
SCHEDULED |= {"directive", "env", "launcher_arg"} | CONTAINER
"""Options of targets of schedulers, which choose the hosts; of ``-H`` only the counts are used."""


def for_ssh(spec: JobSpec) -> str:
    """Return the arguments of ssh as one text, which MPI's launchers split at spaces.

    Errors:
        LaunchError: an argument with a space.
    """
    split = next((word for word in spec.ssh_arguments if set(word) & set(" \t\n")), None)
    if split is not None:
        raise LaunchError(
            "mpirun cannot pass an argument with a space to ssh",
            found=repr(split),
            next_step="set it in ~/.ssh/config, or use --to hvdtrain",
        )
    return " ".join(spec.ssh_arguments)


def network_variables(spec: JobSpec) -> dict[str, str]:
    """Return the variables by which NCCL and torch's Gloo use the job's interface, without those that the user set.

    NCCL takes all interfaces with a name that begins so (NCCL's manual).
    """
    between = spec.interface and (spec.remote or spec.discover is not None)  # a profile's may be missing on this host
    names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if between else ()
    return {name: spec.interface for name in names if name not in spec.pass_on}


def fill(template: str, **values: Any) -> str:
    """Render a file of ``templates``, which quotes user input with the filters q for shells and y for YAML.

    A missing value is an error.
    """
    return _environment().get_template(template).render(**values)


@cache
def _environment() -> Environment:
    made = Environment(  # noqa: S701  (not HTML)
        loader=PackageLoader("hvdtrain.launch"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters["q"] = lambda word: join([word])
    made.filters["y"] = partial(json.dumps, ensure_ascii=False)
    return made


def clock(seconds: int) -> str:
    """Return a time as ``HH:MM:SS``."""
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


Pick = tuple[Mpi | None, str]
"""The MPI of the ranks, and a note about it, "" or beginning with "; "."""


def own_mpi(machine: Machine, in_image: bool) -> Pick:
    """Pick the MPI that Horovod uses here, or for images one where there is no Horovod. A script needs neither."""
    if in_image and (first := machine.mpi_for_image):
        return first, f"; {needs_in_image(first)}"
    return machine.own_mpi, ""


@dataclass(frozen=True)
class Target:
    """A way to start a job."""

    name: str  # of ``--to``
    render: Callable[[JobSpec], Command | Script]  # renders the start. Pure
    takes: frozenset[str]  # options of `hvdtrain launch` that it uses, besides the common ones
    choose: Callable[[Machine, bool], Pick] = own_mpi  # picks the MPI; the second: whether ranks run in containers
    auto: Callable[[Machine], str] = lambda machine: ""  # why ``--to auto`` chooses it on this machine; "" if not
    refuse: Callable[[JobSpec, str], None] = lambda spec, to: None  # raises LaunchError for jobs that it cannot start
    even: bool = False  # whether all hosts get equally many ranks
    by_srun: bool = False  # whether srun starts the ranks
    shows_variables: bool = False  # whether other users can see variables: in the list of jobs, or on command lines
    elsewhere: bool = False  # whether ranks run in an image, with other variables than this process


def mpirun(flavour: str, render: Callable[[JobSpec], Command], *, even: bool = False) -> Target:
    """Return the target of the mpirun of an MPI; ``--to`` has the name of its flavour."""
    return Target(flavour, render, BY_MPI, lambda here, in_image: (here.mpi_named(flavour, in_image), ""), even=even)
