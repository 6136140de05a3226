"""Make the folder of ``hvdtrain bundle``, which installs everything without a package registry.

The folder contains no information about this machine. The output of pip, which names registries and paths, goes to a
log elsewhere.

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
from zipfile import ZipFile, is_zipfile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from hvdtrain import __version__
from hvdtrain.errors import BuildError
from hvdtrain.files import fsync, write_text
from hvdtrain.install.build import check_sdist, digest
from hvdtrain.install.build_plan import HOROVOD, SDIST, SDIST_SHA256
from hvdtrain.install.fetch import Pip, Target, closure, pins
from hvdtrain.install.prerequisites import NEEDED_BYTES, TOOLKIT
from hvdtrain.install.steps import Say
from hvdtrain.install.venv import OPEN_MPI

_SUMS = "SHA256SUMS"
_MANIFEST = "manifest.json"
_SCRIPT = "install.sh"

FORMAT = 1
ROOTS = ("pip", "setuptools", "wheel", "cmake", OPEN_MPI)
"""Packages to install besides torch and hvdtrain. cmake and Open MPI are used only if the target machine has none."""


class BundleFolder:
    """The folder of a bundle."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.packages = path / "packages"  # the wheels and Horovod's source
        self.partial = path / ".partial"  # incomplete files, removed at the end

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
        sums = self.path / _SUMS
        for line in sums.read_text().splitlines() if sums.exists() else []:
            expected, path = line[:64], self.path / line[66:]
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


def _read_target(path: Path, key: str = "") -> Target | None:
    """Read the target of a bundle from a JSON file, or from one of its keys; None if it has none."""
    try:
        content = json.loads(path.read_text())
        return Target(**(content[key] if key else content))
    except (OSError, ValueError, KeyError, TypeError, BuildError):
        return None


@dataclass(frozen=True)
class Source:
    """The inputs of a bundle."""

    project: Path  # folder with hvdtrain's setup.cfg and constraints.txt
    cached_sdist: Path  # Horovod's source in the cache of builds; it may be missing
    log: Path  # file for the output of pip
    environ: Mapping[str, str]


def make(source: Source, out: Path, target: Target, say: Say) -> int:
    """Make a bundle, or complete an interrupted one, and return its size in bytes.

    The folder `out` is new, empty, or a bundle for the same target. Errors: BuildError if a package cannot be fetched
    or written, or the folder contains something else.
    """
    require_project(source.project)
    folder = BundleFolder(out)
    try:
        with folder.locked(target), source.log.open("w") as log:
            return _make(source, folder, target, Pip(source.environ, folder.partial, log), say)
    except (FileExistsError, NotADirectoryError) as error:
        raise BuildError(
            f"{out} cannot be the folder of a bundle.",
            expected="a folder, or a new name",
            found=f"{error.filename}: {error.strerror}",
            next_step="name another folder",
        ) from error
    except OSError as error:
        raise BuildError(
            f"{out} cannot be written.",
            found=str(error),
            next_step="free some disk space, or name a folder on another disk; fetched files are kept",
        ) from error


def require_project(project: Path) -> None:
    """Check that the sources of hvdtrain exist, which a bundle needs. Errors: BuildError if some are missing."""
    missing = [name for name in ("setup.cfg", "constraints.txt") if not (project / name).is_file()]
    if missing:
        raise BuildError(
            "A bundle can only be made from hvdtrain's repository, which pins the versions.",
            expected=f"{' and '.join(missing)} in {project}",
            next_step="in a clone of the repository: make setup, then .venv/bin/hvdtrain bundle",
        )


def _make(source: Source, folder: BundleFolder, target: Target, pip: Pip, say: Say) -> int:
    for name in folder.remove_damaged():
        say(f"{name} was modified; fetching it again")
    pinned = pins((source.project / "constraints.txt").read_text(), target.markers)
    own = folder.add(pip.build(source.project))

    def fetch(requirement: Requirement) -> Path:
        if canonicalize_name(requirement.name) == "hvdtrain":
            return own
        found = folder.find_wheel(requirement)
        if found is None:
            say(f"fetching {requirement}")
            found = folder.add(pip.download(requirement, target))
        return found

    # torch first: the exact versions that it requires precede the pins
    roots = (f"torch=={target.torch}", *ROOTS, f"hvdtrain[{target.extras}]")
    pinned["torch"] = target.torch
    wheels = closure(roots, pinned, target.markers, fetch, target.installed)
    if "cuda-toolkit" in wheels:  # torch with CUDA: its Horovod is compiled with nvcc, which the target may lack
        wheels |= closure((*roots, TOOLKIT), pinned, target.markers, fetch, target.installed)
    sdist = folder.packages / SDIST
    if digest(sdist) != SDIST_SHA256:
        say(f"fetching {SDIST}")
        if digest(source.cached_sdist) == SDIST_SHA256:
            fetched = Path(shutil.copyfile(source.cached_sdist, pip.folder / SDIST))
        else:
            fetched = pip.download_sdist()
            check_sdist(fetched)
        folder.add(fetched)
    needed = NEEDED_BYTES
    for wheel in wheels.values():
        with ZipFile(wheel) as archive:
            needed += sum(member.file_size for member in archive.infolist())
    manifest = {
        "format": FORMAT,
        "created_by": f"hvdtrain {__version__}",
        "for": asdict(target),
        "horovod": HOROVOD,
        "packages": {name: str(parse_wheel_filename(path.name)[1]) for name, path in sorted(wheels.items())},
        "needed_bytes": needed,
    }
    return folder.finish({sdist, *wheels.values()}, manifest, script(target, needed))


def script(target: Target, needed_bytes: int) -> str:
    """Return the script that installs a bundle, from the template in this folder."""
    text = Path(__file__).with_name("install.sh").read_text()
    values = {
        "PYTHON": target.python,
        "MACHINE": target.machine,
        "GLIBC_MINOR": str(target.glibc_minor),
        "NEEDED_KIB": str(-(-needed_bytes // 1024)),
        "EXTRAS": target.extras,
        "INSTALLED": " ".join(target.installed),
        "OPEN_MPI": OPEN_MPI,
    }
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text
