"""The folder of a bundle: locking, complete packages, checksums.

On disk: ``packages/`` with wheels and Horovod's source, ``manifest.json``, ``install.sh``, ``SHA256SUMS``, and
``.partial/`` until the bundle is complete. A package is fetched into ``.partial``, fsynced and renamed into
``packages``: files in ``packages`` are complete and not fetched again. The checksums are written last. ``install.sh``
refuses a bundle without them, or with files that they do not name.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from zipfile import is_zipfile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from hvdtrain.errors import BuildError
from hvdtrain.files import fsync, write_text
from hvdtrain.install.build import digest
from hvdtrain.install.target import Target

_SUMS = "SHA256SUMS"
_MANIFEST = "manifest.json"
_SCRIPT = "install.sh"


@dataclass(frozen=True)
class BundleFolder:
    """The folder of a bundle."""

    path: Path

    @property
    def packages(self) -> Path:
        """Folder of the wheels and Horovod's source."""
        return self.path / "packages"

    @property
    def partial(self) -> Path:
        """Folder for incomplete files, removed at the end."""
        return self.path / ".partial"

    @contextmanager
    def locked(self, target: Target) -> Iterator[None]:
        """Lock the folder for this process, and reserve it for one target.

        Errors: BuildError if another process has locked it, or it contains something else.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDONLY)  # the kernel closes it even after kill -9
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BuildError(
                    f"Another process is making the bundle {self.path}.", next_step="wait for it, or stop it"
                ) from None
            self._begin(target)
            yield
        finally:
            os.close(descriptor)

    def remove_damaged(self) -> list[str]:
        """Remove packages of a complete bundle that no longer match their checksums, and return their names."""
        dropped = []
        for name, expected in self._sums().items():
            path = self.path / name
            if path.parent == self.packages and path.exists() and digest(path) != expected:
                path.unlink()
                dropped.append(path.name)
        return dropped

    def find_wheel(self, requirement: Requirement) -> Path | None:
        """Return an already fetched wheel for a requirement, or None. All wheels are for one target."""
        for path in sorted(self.packages.glob("*.whl")):
            name, version, _, _ = parse_wheel_filename(path.name)
            wanted = name == canonicalize_name(requirement.name) and is_zipfile(path)
            if wanted and requirement.specifier.contains(version, prereleases=True):
                return path
        return None

    def add(self, fetched: Path) -> Path:
        """Move a complete file from ``.partial`` into ``packages``, atomically."""
        kept = self.packages / fetched.name
        fsync(fetched)
        fetched.replace(kept)
        fsync(self.packages)
        return kept

    def finish(self, wanted: set[Path], manifest: Mapping[str, object], script: str) -> int:
        """Write all other files, the checksums last, and return the size of the bundle in bytes."""
        for path in set(self.packages.iterdir()) - wanted:
            path.unlink()  # a version that is no longer pinned
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
        former = _read_target(request) or _read_target(self.path / _MANIFEST, "for")
        if former is None and any(path != self.partial for path in self.path.iterdir()):
            raise BuildError(f"{self.path} exists and is not a bundle.", next_step="name a new folder, or an empty one")
        if former not in (None, target):
            raise BuildError(
                f"{self.path} is a bundle for another target.",
                expected=str(target),
                found=str(former),
                next_step="name another folder: a bundle is for one Python, platform and torch",
            )
        self.partial.mkdir(exist_ok=True)
        write_text(request, json.dumps(asdict(target)))
        self.packages.mkdir(exist_ok=True)

    def _sums(self) -> dict[str, str]:
        path = self.path / _SUMS
        lines = path.read_text().splitlines() if path.exists() else []
        return {line[66:]: line[:64] for line in lines}


def _read_target(path: Path, key: str = "") -> Target | None:
    """Read the target of a bundle from a JSON file, or from one of its keys; None if it has none."""
    try:
        content = json.loads(path.read_text())
        return Target(**(content[key] if key else content))
    except (OSError, ValueError, KeyError, TypeError, BuildError):
        return None
