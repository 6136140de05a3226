"""Ranks in containers: the words by which pyxis or Apptainer starts them in an image.

Both give ranks the environment of the host, except variables that the image sets, and both leave PATH to the image.
Software of the host must not reach the image's Python and MPI, so the variables in `HIDDEN` are removed on the host,
except those that the user passes by name. The image may set its own.

Apptainer: https://apptainer.org/docs/user/latest/environment_and_metadata.html, for MPI the hybrid model of
https://apptainer.org/docs/user/latest/mpi.html. pyxis: https://github.com/NVIDIA/pyxis/wiki/Usage, and ``srun --help``
of pyxis 0.15 for ``--container-env``.
"""

from __future__ import annotations

from collections.abc import Iterable

from hvdtrain.errors import LaunchError
from hvdtrain.launch.spec import PYXIS, Container, JobSpec
from hvdtrain.launch.targets.base import network_variables

HIDDEN = ("PYTHONHOME", "PYTHONPATH", "PYTHONUSERBASE", "VIRTUAL_ENV", "CONDA_PREFIX", "OPAL_PREFIX", "I_MPI_ROOT")
"""Variables of the host that name folders with its Python packages or its MPI."""

_NO_HOME = "PYTHONNOUSERSITE=1"
"""The home folder is often mounted: packages of ``pip install --user`` would come before those of the image."""


_NO_CMA = "OMPI_MCA_btl_vader_single_copy_mechanism"
"""Without setuid, each container of Apptainer has its own user namespace. Between two of them Open MPI 4.1.8 may hang
in the first collective, where it tries to copy directly between processes.
"""


def rank_argv(spec: JobSpec, *before: str) -> tuple[str, ...]:
    """Return the command with which a launcher starts each rank. `before`: words before the program.

    Errors:
        LaunchError: a mount that the runtime would misread.
    """
    program, box = (*before, *spec.program), spec.container
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
    where NAME is set. LD_LIBRARY_PATH is removed too, which pyxis would pass on, unlike Apptainer.

    Errors:
        LaunchError: a mount that pyxis would misread.
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
