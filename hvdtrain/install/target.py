"""What a bundle is for: a Python, a platform and a torch, as wheels and markers of requirements name them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from hvdtrain.errors import BuildError

_OLDEST_PYTHON = 10
_OLDEST_GLIBC = 5  # manylinux_2_5, the first that wheels have names for
_FORMER_NAMES = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}


@dataclass(frozen=True)
class Target:
    """Machines of one kind.

    Attributes:
        python: as ``3.11``.
        platform: as ``manylinux_2_28_x86_64``: the oldest glibc that such a machine may have, and its processor.
        torch: the version, with its local part where that matters: ``2.13.0+cpu``.
    """

    python: str
    platform: str
    torch: str

    def __post_init__(self) -> None:
        """Refuse what no wheel can be for.

        Raises:
            BuildError: the Python is none or too old, the platform is not Linux with glibc.
        """
        python = re.fullmatch(r"3\.(\d+)", self.python)
        if not python or int(python[1]) < _OLDEST_PYTHON:
            raise BuildError(
                "There are no bundles for this Python.",
                expected=f"3.{_OLDEST_PYTHON} or newer, without a third number",
                found=self.python,
                next_step="--python 3.11",
            )
        if not re.fullmatch(r"manylinux_2_\d+_[a-z]\w*", self.platform) or self.glibc_minor < _OLDEST_GLIBC:
            raise BuildError(
                "There are no bundles for this platform.",
                expected="Linux with glibc, named manylinux_2_MINOR_PROCESSOR",
                found=self.platform,
                next_step="--platform manylinux_2_28_x86_64   (`ldd --version` and `uname -m` tell, on that machine)",
            )

    def __str__(self) -> str:
        return f"Python {self.python} on {self.platform} with torch {self.torch}"

    @property
    def abi(self) -> str:
        """As in the names of wheels: ``cp311``."""
        return "cp" + self.python.replace(".", "")

    @property
    def glibc_minor(self) -> int:
        """28 of glibc 2.28."""
        return int(self.platform.split("_")[2])

    @property
    def machine(self) -> str:
        """As ``uname -m`` says it."""
        return self.platform.split("_", 3)[3]

    @property
    def platforms(self) -> tuple[str, ...]:
        """Names of all platforms whose wheels such a machine takes, best first."""
        names: list[str] = []
        for minor in range(self.glibc_minor, _OLDEST_GLIBC - 1, -1):
            names.append(f"manylinux_2_{minor}_{self.machine}")
            if minor in _FORMER_NAMES:
                names.append(f"{_FORMER_NAMES[minor]}_{self.machine}")
        return (*names, f"linux_{self.machine}")

    @property
    def markers(self) -> Mapping[str, str]:
        """What the markers of requirements mean there, whatever runs this."""
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


def python_here() -> str:
    """Give the running Python's version as a `Target` names it."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def platform_here() -> str:
    """Name this machine's platform.

    Raises:
        BuildError: it has no glibc, and there are no wheels of torch for it.
    """
    try:
        library = os.confstr("CS_GNU_LIBC_VERSION") or ""  # glibc 2.36
    except (OSError, ValueError):
        library = ""
    version = re.fullmatch(r"glibc 2\.(\d+)", library)
    if not version:
        raise BuildError(
            "This machine's C library is not glibc.",
            next_step="name the platform that the bundle is for: --platform manylinux_2_28_x86_64",
        )
    return f"manylinux_2_{version[1]}_{os.uname().machine}"
