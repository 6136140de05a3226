"""Find all wheels that a bundle needs: the requested ones and their dependencies, for one target.

pip downloads each wheel, but its resolver cannot find the set. ``pip install --dry-run --report`` and ``pip download``
use ``--python-version`` and ``--platform`` to choose files only, and evaluate markers for the Python that runs pip.
Measured with pip on Python 3.11 for our requirements: with Python 3.10 as the target, our constraints conflict
(ResolutionImpossible), because pip applies the pins of 3.11; with the pins of 3.10, the set lacks 2 of 73 packages
(exceptiongroup and tomli). For 3.11 to 3.13 the sets are equal.

As all versions are pinned, no resolver is needed: this module follows the dependencies from wheel to wheel with the
markers of the target, and checks that each requirement is satisfied.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from email.parser import HeaderParser
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from hvdtrain.errors import BuildError

_METADATA = re.compile(r"[^/]+\.dist-info/METADATA")

Fetch = Callable[[Requirement], Path]


def pins(text: str, markers: Mapping[str, str]) -> dict[str, str]:
    """Return the version of each package in a constraints file, for the given markers."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    active = [pin for pin in map(Requirement, lines) if pin.marker is None or pin.marker.evaluate(dict(markers))]
    return {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in active}


def closure(
    roots: Sequence[str],
    pinned: Mapping[str, str],
    markers: Mapping[str, str],
    fetch: Fetch,
    installed: Collection[str] = (),
) -> dict[str, Path]:
    """Fetch the requested packages and all their dependencies, and return a wheel by each name.

    The requirements of an earlier root precede the pins and the requirements of a later root. A pin that a requirement
    excludes is ignored. Packages in `installed`, which the target has, are not fetched.

    Raises:
        BuildError: two packages have incompatible requirements.
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
    with ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if _METADATA.fullmatch(name))
        headers = HeaderParser().parsestr(archive.read(name).decode())
    for text in headers.get_all("Requires-Dist", []):
        needed = Requirement(text)
        if needed.marker is None or needed.marker.evaluate({**markers, "extra": extra}):
            yield needed


def _pinned(requirement: Requirement, pin: str | None) -> Requirement:
    if pin is not None and requirement.specifier.contains(pin, prereleases=True):
        return Requirement(f"{requirement.name}=={pin}")
    return Requirement(f"{requirement.name}{requirement.specifier}")
