"""The software environment of a shell, as lines with which a batch script restores it. Pure.

Environment modules (Lmod and the Tcl version set the same variables), Spack, conda, virtual environments. A job starts
on another host, by a shell that is not a login shell, and the scheduler may not pass the environment on.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath


def setup_lines(environ: Mapping[str, str]) -> list[str]:
    """Return the commands that restore the active software, in order, each below its reason as a comment.

    A failing command ends the script: without its software the job would fail later, with a less clear error.
    """
    commands = [*_modules(environ), *_spack(environ), *_conda(environ), *_venv(environ)]
    return [f"# {reason}\n{command}" for reason, command in commands]


def _modules(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    loaded = [name for name in environ.get("LOADEDMODULES", "").split(":") if name]
    if not loaded:
        return
    if home := environ.get("MODULESHOME"):
        start = f"command -v module >/dev/null || {_source(home, 'init/bash')}"
        yield "the command module, which only a login shell is sure to have", start
    if path := environ.get("MODULEPATH"):
        yield "where modules were found, module use included", f"export MODULEPATH={shlex.quote(path)}"
    yield "the modules that were loaded, and no others", "module purge"
    yield "in the order in which they were loaded", _or_exit("module", "load", *loaded)


def _spack(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    folder, root = environ.get("SPACK_ENV"), environ.get("SPACK_ROOT")
    if not folder:
        return
    if root:
        yield "the command spack as a function of the shell", _source(root, "share/spack/setup-env.sh")
    yield "the Spack environment that was active", _or_exit("spack", "env", "activate", "--dir", folder)


def _conda(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    prefix, program = environ.get("CONDA_PREFIX"), environ.get("CONDA_EXE")
    if not prefix:
        return
    if program:
        base = str(PurePosixPath(program).parent.parent)
        yield "the command conda as a function of the shell", _source(base, "etc/profile.d/conda.sh")
        yield "the conda environment that was active, by its path", _or_exit("conda", "activate", prefix)
    else:  # packed, or micromamba's: the program that would activate it is unknown
        reason = "the conda environment that was active, without its activation scripts: no CONDA_EXE was set"
        yield reason, f"export CONDA_PREFIX={shlex.quote(prefix)} PATH={shlex.quote(prefix + '/bin')}:$PATH"


def _venv(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    if folder := environ.get("VIRTUAL_ENV"):
        yield "the virtual environment that was active", _source(folder, "bin/activate")


def _source(folder: str, file: str) -> str:
    return _or_exit(".", str(PurePosixPath(folder) / file))


def _or_exit(*words: str) -> str:
    return f"{shlex.join(words)} || exit"
