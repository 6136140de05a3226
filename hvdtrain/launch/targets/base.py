"""The contract of a target: its name, its options, the function that renders the start; and what targets share.

Containers: pyxis or Apptainer start the ranks in an image. Both give ranks the environment of the host, except
variables that the image sets, and both leave PATH to the image. Software of the host must not reach the image's Python
and MPI, so the variables in `HIDDEN` are removed on the host, except those that the user passes by name. The image may
set its own.

Apptainer: https://apptainer.org/docs/user/latest/environment_and_metadata.html, for MPI the hybrid model of
https://apptainer.org/docs/user/latest/mpi.html. pyxis: https://github.com/NVIDIA/pyxis/wiki/Usage, and ``srun --help``
of pyxis 0.15 for ``--container-env``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from hvdtrain.errors import LaunchError
from hvdtrain.launch.detect import Machine, needs_in_image
from hvdtrain.launch.spec import PYXIS, Command, Container, JobSpec, Mpi, Script, join

CONTAINER = frozenset({"container", "container_mount", "container_runtime"})
"""Options of targets that can start ranks in containers."""

BY_MPI = frozenset({"hosts", "interface", "ssh_port", "ssh_option", "env", "launcher_arg"}) | CONTAINER
"""Options of targets that reach named hosts."""

SCHEDULED = frozenset({"hosts", "nodes", "gpus_per_node", "cpus_per_rank", "time", "queue", "account", "name"})
SCHEDULED |= {"directive", "env", "launcher_arg"} | CONTAINER
"""Options of targets of schedulers, which choose the hosts; of ``-H`` only the counts are used."""

HIDDEN = ("PYTHONHOME", "PYTHONPATH", "PYTHONUSERBASE", "VIRTUAL_ENV", "CONDA_PREFIX", "OPAL_PREFIX", "I_MPI_ROOT")
"""Variables of the host that name folders with its Python packages or its MPI."""

_NO_HOME = "PYTHONNOUSERSITE=1"
"""The home folder is often mounted: packages of ``pip install --user`` would come before those of the image."""

_NO_CMA = "OMPI_MCA_btl_vader_single_copy_mechanism"
"""Without setuid, each container of Apptainer has its own user namespace. Between two of them Open MPI 4.1.8 may hang
in the first collective, where it tries to copy directly between processes.
"""


def for_ssh(spec: JobSpec) -> str:
    """Join the arguments of ssh to a text, which mpirun splits at spaces. Errors: LaunchError if one has a space."""
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

    The filter clock renders seconds as ``HH:MM:SS``. A missing value is an error.
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
    made.filters["clock"] = lambda s: f"{s // 3600:02}:{s // 60 % 60:02}:{s % 60:02}"
    return made


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


def rank_argv(spec: JobSpec) -> tuple[str, ...]:
    """Return the command with which a launcher starts each rank.

    Errors: LaunchError for a mount that the runtime would misread.
    """
    program, box = spec.program, spec.container
    if box is None or box.runtime == PYXIS:
        return program
    words = [*_without_hidden(box, HIDDEN)]
    words += [f"{_NO_CMA}=none"] if spec.mpi and spec.mpi.flavour == "openmpi" and _NO_CMA not in box.override else []
    words += [box.runtime, "exec"]
    words += ["--nv"] if box.gpus else []
    words += [word for mount in _mounts(spec, box, ',"\\\n') for word in ("--bind", mount)]
    return (*words, "--pwd", spec.folder, box.image, *program)


def srun_argv(spec: JobSpec) -> list[str]:
    """Return the start of a command line of srun: with pyxis, the container of the ranks.

    The variables are removed from srun's own environment: of ``--export=ALL,NAME=`` srun 22.05 ignores the second part
    where NAME is set. LD_LIBRARY_PATH is removed too, which pyxis would pass on, unlike Apptainer. Errors: LaunchError
    for a mount that pyxis would misread.
    """
    box = spec.container
    if box is None or box.runtime != PYXIS:
        return ["srun"]
    mounts = ",".join(_mounts(spec, box, ',"\\$` \t\n'))  # pyxis writes them into a script and a line of fstab
    override = ",".join(dict.fromkeys((*box.override, *network_variables(spec))))
    return [
        *_without_hidden(box, (*HIDDEN, "LD_LIBRARY_PATH")),
        "srun",
        f"--container-image={box.image}",
        f"--container-mounts={mounts}",
        f"--container-workdir={spec.folder}",
        *([f"--container-env={override}"] if override else []),
    ]


def _without_hidden(box: Container, hidden: Iterable[str]) -> tuple[str, ...]:
    names = [name for name in hidden if name not in box.override]
    return ("env", *(word for name in names for word in ("-u", name)), _NO_HOME)


def _mounts(spec: JobSpec, box: Container, special: str) -> tuple[str, ...]:
    """Return all mounts. `special`: characters that the runtime would not take as part of a path."""
    mounts = (f"{spec.folder}:{spec.folder}", *box.mounts)
    wrong = next((mount for mount in mounts if set(mount) & set(special)), spec.folder if ":" in spec.folder else None)
    if wrong is not None:
        raise LaunchError(
            f"{box.runtime} cannot mount this path in a container",
            expected=f"a working folder and mounts without any of {':' + special!r}",
            found=repr(wrong),
            next_step="use another folder, or a link to it under a plain name",
        )
    return mounts
