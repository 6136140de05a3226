"""Which wheels a bundle needs: all that is asked for, and what these need in turn, for one target.

pip has a resolver, but its ``--python-version`` chooses wheels only: markers such as ``python_version < "3.11"`` are
still judged by the Python that runs it, and a bundle for another one lacks packages. The versions are pinned, so that
nothing has to be resolved: it is walked from wheel to wheel, and at the end every requirement is met.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from email.parser import HeaderParser
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from hvdtrain.errors import BuildError

_METADATA = re.compile(r"[^/]+\.dist-info/METADATA")

Fetch = Callable[[Requirement], Path]


def pins(text: str, markers: Mapping[str, str]) -> dict[str, str]:
    """Read the version that a constraints file gives to each package, where these markers hold."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    held = [pin for pin in map(Requirement, lines) if pin.marker is None or pin.marker.evaluate(dict(markers))]
    return {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in held}


def closure(
    roots: Sequence[str], pinned: Mapping[str, str], markers: Mapping[str, str], fetch: Fetch
) -> dict[str, Path]:
    """Fetch what is asked for and all that it needs.

    Args:
        roots: requirements; what an earlier one needs goes before the pins, and before what a later one needs.
        pinned: versions by name; one that a requirement does not allow is left aside for it.
        markers: the target's.
        fetch: gives the wheel of a requirement.

    Returns:
        A wheel by each name.

    Raises:
        BuildError: two packages need what does not go together.
    """
    wheels: dict[str, Path] = {}
    wanted_by: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    left = deque((Requirement(root), "the bundle") for root in roots)
    while left:
        requirement, by = left.popleft()
        name = canonicalize_name(requirement.name)
        if name not in wheels:
            wheels[name] = fetch(_choice(requirement, pinned.get(name)))
            wanted_by[name] = f"{by} ({requirement.name}{requirement.specifier})"
        version = str(parse_wheel_filename(wheels[name].name)[1])
        if not requirement.specifier.contains(version, prereleases=True):
            raise BuildError(
                f"{name} {version} does not go together with {by}.",
                expected=f"{requirement.name}{requirement.specifier}",
                found=f"{name} {version}, wanted by {wanted_by[name]}",
                next_step="name a torch that goes with the pinned versions (--torch), or pin others in constraints.txt",
            )
        for extra in ("", *sorted(requirement.extras)):
            if (name, extra) not in seen:
                seen.add((name, extra))
                left += [(needed, f"{name} {version}") for needed in needs(wheels[name], extra, markers)]
    return wheels


def needs(wheel: Path, extra: str, markers: Mapping[str, str]) -> Iterator[Requirement]:
    """Give what a wheel says that it needs, for one of its extras; the empty one is what it always needs."""
    with ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if _METADATA.fullmatch(name))
        headers = HeaderParser().parsestr(archive.read(name).decode())
    for text in headers.get_all("Requires-Dist", []):
        needed = Requirement(text)
        if needed.marker is None or needed.marker.evaluate({**markers, "extra": extra}):
            yield needed


def _choice(requirement: Requirement, pin: str | None) -> Requirement:
    if pin is not None and requirement.specifier.contains(pin, prereleases=True):
        return Requirement(f"{requirement.name}=={pin}")
    return Requirement(f"{requirement.name}{requirement.specifier}")
