"""The target of a bundle, and the packages that it needs for it: those requested, and their dependencies.

pip downloads each wheel, but its resolver cannot find the set. ``pip install --dry-run --report`` and ``pip download``
use ``--python-version`` and ``--platform`` to choose files only, and evaluate markers for the Python that runs pip. For
Python 3.10, the pip of 3.11 applies the pins of 3.11, which conflict (ResolutionImpossible); with those of 3.10 it
leaves out exceptiongroup and tomli. (For 3.11 to 3.13 the sets are equal.)

As all versions are pinned, no resolver is needed: `closure` follows the dependencies from wheel to wheel with the
markers of the target, and checks that each requirement is satisfied.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TextIO

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from hvdtrain.errors import BuildError
from hvdtrain.install.build_plan import DROPPED_PREFIXES, fetch_step
from hvdtrain.install.steps import OFFLINE, Step, run
from hvdtrain.install.venv import EXTRAS

_OLDEST_PYTHON = 10
_OLDEST_GLIBC = 5  # manylinux_2_5 is the oldest tag of wheels
_FORMER_NAMES = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}

_PIP = (sys.executable, "-m", "pip")
_OWN = ("setup.py", "setup.cfg", "README.md", "LICENSE")
_EPOCH = "315532800"  # 1980-01-01, the earliest date of a zip file. A fixed date makes wheels reproducible


@dataclass(frozen=True)
class Target:
    """The target machines of a bundle."""

    python: str  # version, such as ``3.11``
    platform: str  # oldest glibc and processor, such as ``manylinux_2_28_x86_64``
    torch: str  # version, optionally with its local part: ``2.13.0+cpu``
    installed: tuple[str, ...] = ()  # packages that the target has; neither they nor their dependencies are bundled
    extras: str = EXTRAS  # hvdtrain's extras to install

    def __post_init__(self) -> None:
        """Check Python and platform. Errors: BuildError."""
        object.__setattr__(self, "installed", tuple(self.installed))  # JSON has lists
        python = re.fullmatch(r"3\.(\d+)", self.python)
        if not python or int(python[1]) < _OLDEST_PYTHON:
            raise BuildError(
                "A bundle cannot be made for this Python.",
                expected=f"3.{_OLDEST_PYTHON} or newer, without a patch version",
                found=self.python,
                next_step="--python 3.11",
            )
        if not re.fullmatch(r"manylinux_2_\d+_[a-z]\w*", self.platform) or self.glibc_minor < _OLDEST_GLIBC:
            raise BuildError(
                "A bundle cannot be made for this platform.",
                expected="Linux with glibc, named manylinux_2_MINOR_PROCESSOR",
                found=self.platform,
                next_step="--platform manylinux_2_28_x86_64   (run `ldd --version` and `uname -m` on that machine)",
            )

    def __str__(self) -> str:
        installed = f"; {', '.join(self.installed)} already installed" if self.installed else ""
        return f"Python {self.python} on {self.platform} with torch {self.torch}{installed}"

    @property
    def abi(self) -> str:
        """The ABI tag of wheels, such as ``cp311``."""
        return "cp" + self.python.replace(".", "")

    @property
    def glibc_minor(self) -> int:
        """Minor version of glibc: 28 for glibc 2.28."""
        return int(self.platform.split("_")[2])

    @property
    def machine(self) -> str:
        """Processor, as printed by ``uname -m``."""
        return self.platform.split("_", 3)[3]

    @property
    def platforms(self) -> tuple[str, ...]:
        """Platform tags of all wheels that the target accepts, best first."""
        names: list[str] = []
        for minor in range(self.glibc_minor, _OLDEST_GLIBC - 1, -1):
            names.append(f"manylinux_2_{minor}_{self.machine}")
            if minor in _FORMER_NAMES:
                names.append(f"{_FORMER_NAMES[minor]}_{self.machine}")
        return (*names, f"linux_{self.machine}")

    @property
    def markers(self) -> Mapping[str, str]:
        """Environment markers of the target."""
        return {
            "implementation_name": "cpython",
            "implementation_version": f"{self.python}.0",
            "os_name": "posix",
            "platform_machine": self.machine,
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "python_full_version": f"{self.python}.0",
            "python_version": self.python,
            "sys_platform": "linux",
        }


def this_platform() -> str:
    """Return the platform of this machine. Errors: BuildError if it has no glibc, which torch's wheels need."""
    try:
        library = os.confstr("CS_GNU_LIBC_VERSION") or ""  # glibc 2.36
    except (OSError, ValueError):
        library = ""
    version = re.fullmatch(r"glibc 2\.(\d+)", library)
    if not version:
        raise BuildError(
            "The C library of this machine is not glibc.",
            next_step="name the platform that the bundle is for: --platform manylinux_2_28_x86_64",
        )
    return f"manylinux_2_{version[1]}_{os.uname().machine}"


def pins(text: str, markers: Mapping[str, str]) -> dict[str, str]:
    """Return the version of each package in a constraints file, for the given markers."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    active = [pin for pin in map(Requirement, lines) if pin.marker is None or pin.marker.evaluate(dict(markers))]
    return {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in active}


def closure(
    roots: Sequence[str],
    pinned: Mapping[str, str],
    markers: Mapping[str, str],
    fetch: Callable[[Requirement], Path],
    installed: Collection[str] = (),
) -> dict[str, Path]:
    """Fetch the requested packages and all their dependencies, and return a wheel by each name.

    The requirements of an earlier root precede the pins and the requirements of a later root. A pin that a requirement
    excludes is ignored. Packages in `installed`, which the target has, are not fetched. Errors: BuildError if two
    packages have incompatible requirements.
    """
    wheels: dict[str, Path] = {}
    required_by: dict[str, str] = {}
    visited: set[tuple[str, str]] = set()
    left = deque((Requirement(root), "the bundle") for root in roots)
    while left:
        requirement, by = left.popleft()
        name = canonicalize_name(requirement.name)
        if name in installed:
            continue
        if name not in wheels:
            wheels[name] = fetch(_pinned(requirement, pinned.get(name)))
            required_by[name] = f"{by} ({requirement.name}{requirement.specifier})"
        version = str(parse_wheel_filename(wheels[name].name)[1])
        if not requirement.specifier.contains(version, prereleases=True):
            raise BuildError(
                f"{name} {version} is incompatible with {by}.",
                expected=f"{requirement.name}{requirement.specifier}",
                found=f"{name} {version}, required by {required_by[name]}",
                next_step="name a torch that is compatible with the pins (--torch), or edit constraints.txt",
            )
        for extra in ("", *sorted(requirement.extras)):
            if (name, extra) not in visited:
                visited.add((name, extra))
                left += [(needed, f"{name} {version}") for needed in requirements(wheels[name], extra, markers)]
    return wheels


def requirements(wheel: Path, extra: str, markers: Mapping[str, str]) -> Iterator[Requirement]:
    """Yield the requirements of a wheel for one of its extras, or without extras if it is empty."""
    (found,) = metadata.distributions(path=[str(wheel)])  # it reads zip files, too
    for needed in map(Requirement, found.requires or ()):
        if needed.marker is None or needed.marker.evaluate({**markers, "extra": extra}):
            yield needed


def _pinned(requirement: Requirement, pin: str | None) -> Requirement:
    if pin is not None and requirement.specifier.contains(pin, prereleases=True):
        return Requirement(f"{requirement.name}=={pin}")
    return Requirement(f"{requirement.name}{requirement.specifier}")


class Pip:
    """The pip of the running interpreter, with the user's settings. `folder` is for its files, on the bundle's disk."""

    def __init__(self, environ: Mapping[str, str], folder: Path, log: TextIO) -> None:
        self.folder = folder.absolute()
        self._log = log
        kept = {name: value for name, value in environ.items() if not name.startswith(DROPPED_PREFIXES)}
        defaults = {"PIP_RETRIES": "2", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        self._environ = {**defaults, **kept, "TMPDIR": str(self.folder), "SOURCE_DATE_EPOCH": _EPOCH}

    def download(self, requirement: Requirement, target: Target) -> Path:
        """Fetch the wheel of a requirement for a target.

        Errors: BuildError if there is none, or the registry cannot be reached.
        """
        flags = ["--no-deps", "--only-binary", ":all:", "--implementation", "cp", "--abi", target.abi]
        flags += ["--python-version", target.python]
        flags += [word for platform in target.platforms for word in ("--platform", platform)]
        fetched = self._new_folder("wheel")
        argv = (*_PIP, "download", *flags, "--dest", str(fetched), str(requirement))
        try:
            return self._run(Step("wheel", f"fetching {requirement}", "seconds", argv), fetched)
        except BuildError as error:
            if "No matching distribution" not in (error.found or "") or OFFLINE in (error.next_step or ""):
                raise
            none = "from versions: none" in (error.found or "")
            raise BuildError(
                f"There is no wheel of {requirement} for Python {target.python} on {target.platform}.",
                found="no wheel of any version" if none else "only wheels of other versions",
                next_step=f"{_ADVICE.get(requirement.name, _OTHER)}   (log: {self._log.name})",
            ) from error

    def download_sdist(self) -> Path:
        """Fetch Horovod's source."""
        fetched = self._new_folder("sdist")
        return self._run(fetch_step(sys.executable, fetched), fetched)

    def build(self, project: Path) -> Path:
        """Build hvdtrain's wheel from a copy of its sources, which leaves the project unchanged."""
        source, built = self._new_folder("source"), self._new_folder("own")
        for name in _OWN:
            shutil.copy(project / name, source)
        shutil.copytree(project / "hvdtrain", source / "hvdtrain", ignore=shutil.ignore_patterns("__pycache__"))
        flags = ("--no-deps", "--no-build-isolation", "--no-index", "--no-cache-dir", "--wheel-dir", str(built))
        return self._run(Step("own", "building hvdtrain's wheel", "5 s", (*_PIP, "wheel", *flags, str(source))), built)

    def _run(self, step: Step, folder: Path) -> Path:
        """Run pip; return the file that it made in an empty folder.

        Errors: BuildError if it failed; OSError if that was because the disk is full.
        """
        try:
            run(step, self._environ, self.folder, self._log, lambda text: None)
        except BuildError as error:
            for number in (errno.ENOSPC, errno.EDQUOT):
                if os.strerror(number) in (error.found or ""):
                    raise OSError(number, os.strerror(number), str(self.folder)) from error
            raise
        (made,) = folder.iterdir()
        return made

    def _new_folder(self, name: str) -> Path:
        """Return a new folder, without files left by a killed process."""
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder


_OTHER = "name another --python or --platform; or add an index that has the wheel: PIP_EXTRA_INDEX_URL"
_ADVICE = {
    "torch": "name another --torch, --python or --platform; or set PIP_EXTRA_INDEX_URL to an index with it, such as "
    "those for one kind of device: https://pytorch.org/get-started/locally"
}
