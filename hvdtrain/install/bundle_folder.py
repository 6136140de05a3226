"""The folder of a bundle: whose it is, what in it is whole, and when all of it is.

On disk: ``packages/`` with wheels and Horovod's source, ``manifest.json``, ``install.sh``, ``SHA256SUMS``, and while it
is made ``.partial/``. A package is fetched into ``.partial``, fsynced and renamed into ``packages``: what lies there is
whole, and is not fetched again. The checksums are written last: a bundle without them, or with other files than they
name, is refused by its own ``install.sh``.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from hvdtrain.durable import fsync, write_text
from hvdtrain.errors import BuildError
from hvdtrain.install.build import digest
from hvdtrain.install.target import Target

_SUMS = "SHA256SUMS"
_MANIFEST = "manifest.json"
_SCRIPT = "install.sh"


@dataclass(frozen=True)
class BundleFolder:
    """A folder in which a bundle is made."""

    path: Path

    @property
    def packages(self) -> Path:
        """Where pip finds them."""
        return self.path / "packages"

    @property
    def partial(self) -> Path:
        """For what is not whole yet; there while the bundle is made."""
        return self.path / ".partial"

    @contextmanager
    def claimed(self, target: Target) -> Iterator[None]:
        """Hold the folder for this process, and for one target.

        Raises:
            BuildError: another process holds it, or something else is in it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDONLY)  # closed by the kernel, also after kill -9
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BuildError(
                    f"Another process is making {self.path}.", next_step="wait for it, or stop it"
                ) from None
            self._begin(target)
            yield
        finally:
            os.close(descriptor)

    def drop_damaged(self) -> list[str]:
        """Remove packages of a bundle that was finished which are no longer what they were; their names."""
        dropped = []
        for name, expected in self._sums().items():
            path = self.path / name
            if path.parent == self.packages and path.exists() and digest(path) != expected:
                path.unlink()
                dropped.append(path.name)
        return dropped

    def held(self, requirement: Requirement) -> Path | None:
        """Look for a wheel that was fetched before; all are for one target."""
        for path in sorted(self.packages.glob("*.whl")):
            name, version, _, _ = parse_wheel_filename(path.name)
            wanted = name == canonicalize_name(requirement.name) and is_zipfile(path)
            if wanted and requirement.specifier.contains(version, prereleases=True):
                return path
        return None

    def keep(self, fetched: Path) -> Path:
        """Take a file from ``.partial`` into the bundle: whole, or not at all."""
        kept = self.packages / fetched.name
        fsync(fetched)
        fetched.replace(kept)
        fsync(self.packages)
        return kept

    def finish(self, wanted: set[Path], manifest: Mapping[str, object], script: str) -> int:
        """Write all that stands beside the packages, the checksums last; the size of it all in bytes."""
        for path in set(self.packages.iterdir()) - wanted:
            path.unlink()  # of versions that are no longer pinned
        write_text(self.path / _MANIFEST, json.dumps(manifest, indent=2) + "\n")
        write_text(self.path / _SCRIPT, script)
        (self.path / _SCRIPT).chmod(0o755)
        names = [_MANIFEST, _SCRIPT, *(f"{path.parent.name}/{path.name}" for path in wanted)]
        write_text(self.path / _SUMS, "".join(f"{digest(self.path / name)}  {name}\n" for name in sorted(names)))
        shutil.rmtree(self.partial)
        fsync(self.path)
        return sum((self.path / name).stat().st_size for name in names)

    def _begin(self, target: Target) -> None:
        request = self.partial / "request.json"
        former = _target(request, lambda content: content) or _target(
            self.path / _MANIFEST, lambda content: content["for"]
        )
        if former is None and any(path != self.partial for path in self.path.iterdir()):
            raise BuildError(f"{self.path} is there, and is no bundle.", next_step="name a new folder, or an empty one")
        if former not in (None, target):
            raise BuildError(
                f"{self.path} is a bundle for something else.",
                expected=str(target),
                found=str(former),
                next_step="name another folder: one bundle is for one Python, platform and torch",
            )
        self.partial.mkdir(exist_ok=True)
        write_text(request, json.dumps(asdict(target)))
        self.packages.mkdir(exist_ok=True)

    def _sums(self) -> dict[str, str]:
        path = self.path / _SUMS
        lines = path.read_text().splitlines() if path.exists() else []
        return {line[66:]: line[:64] for line in lines}


def _target(path: Path, of: Callable[[Any], Any]) -> Target | None:
    """Read what a folder is a bundle for, or began to be; None when the file does not tell."""
    try:
        return Target(**of(json.loads(path.read_text())))
    except (OSError, ValueError, KeyError, TypeError, BuildError):
        return None
