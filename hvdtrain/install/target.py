"""The target of a bundle: Python, platform and torch, as wheels and requirement markers name them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from hvdtrain.errors import BuildError
from hvdtrain.install.venv import EXTRAS

_OLDEST_PYTHON = 10
_OLDEST_GLIBC = 5  # manylinux_2_5 is the oldest tag of wheels
_FORMER_NAMES = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}


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
