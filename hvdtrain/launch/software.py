"""The software environment of a shell, as lines with which a batch script restores it. Pure.

Environment modules (Lmod and the Tcl version set the same variables), Spack, conda, virtual environments. A job starts
on another host, by a shell that is not a login shell, and the scheduler may not pass the environment on.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath


@dataclass(frozen=True)
class Setup:
    """A command of a batch script.

    Attributes:
        command: for bash or sh. It has more than one line if a name has.
        reason: its purpose, in one line.
    """

    command: str
    reason: str


def setup_lines(environ: Mapping[str, str]) -> list[Setup]:
    """Return the commands that restore the active software, in order.

    A failing command ends the script: without its software the job would fail later, with a less clear error.
    """
    return [*_modules(environ), *_spack(environ), *_conda(environ), *_venv(environ)]


def as_shell(lines: Sequence[Setup]) -> str:
    """Return the commands, each below its reason as a comment."""
    return "".join(f"# {line.reason}\n{line.command}\n" for line in lines)


def _modules(environ: Mapping[str, str]) -> Iterator[Setup]:
    loaded = [name for name in environ.get("LOADEDMODULES", "").split(":") if name]
    if not loaded:
        return
    if home := environ.get("MODULESHOME"):
        start = f"command -v module >/dev/null || {_source(home, 'init/bash')}"
        yield Setup(start, "the command module, which only a login shell is sure to have")
    if path := environ.get("MODULEPATH"):
        yield Setup(f"export MODULEPATH={shlex.quote(path)}", "where modules were found, module use included")
    yield Setup("module purge", "the modules that were loaded, and no others")
    yield Setup(_or_exit("module", "load", *loaded), "in the order in which they were loaded")


def _spack(environ: Mapping[str, str]) -> Iterator[Setup]:
    folder, root = environ.get("SPACK_ENV"), environ.get("SPACK_ROOT")
    if not folder:
        return
    if root:
        yield Setup(_source(root, "share/spack/setup-env.sh"), "the command spack as a function of the shell")
    yield Setup(_or_exit("spack", "env", "activate", "--dir", folder), "the Spack environment that was active")


def _conda(environ: Mapping[str, str]) -> Iterator[Setup]:
    prefix, program = environ.get("CONDA_PREFIX"), environ.get("CONDA_EXE")
    if not prefix:
        return
    if program:
        base = str(PurePosixPath(program).parent.parent)
        yield Setup(_source(base, "etc/profile.d/conda.sh"), "the command conda as a function of the shell")
        yield Setup(_or_exit("conda", "activate", prefix), "the conda environment that was active, by its path")
    else:  # packed, or micromamba's: the program that would activate it is unknown
        paths = f"export CONDA_PREFIX={shlex.quote(prefix)} PATH={shlex.quote(prefix + '/bin')}:$PATH"
        yield Setup(
            paths, "the conda environment that was active, without its activation scripts: no CONDA_EXE was set"
        )


def _venv(environ: Mapping[str, str]) -> Iterator[Setup]:
    if folder := environ.get("VIRTUAL_ENV"):
        yield Setup(_source(folder, "bin/activate"), "the virtual environment that was active")


def _source(folder: str, file: str) -> str:
    return _or_exit(".", str(PurePosixPath(folder) / file))


def _or_exit(*words: str) -> str:
    return f"{shlex.join(words)} || exit"
