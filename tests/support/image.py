"""An image built from a Dockerfile by buildah, which needs no daemon, and commands run in a container of it by runc.

Root is needed.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.host import UnavailableError, tool


@dataclass(frozen=True)
class Store:
    """Where images and containers lie, apart from those of this machine."""

    folder: Path

    def __call__(self, *argv: str) -> str:
        """Run a command of buildah; what it prints."""
        done = self.run(*argv)
        assert done.returncode == 0, f"buildah {argv}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout.strip()

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """The same; it may fail."""
        own = [f"--root={self.folder / 'root'}", f"--runroot={self.folder / 'run'}"]
        return subprocess.run([tool("buildah"), *own, *argv], capture_output=True, text=True)

    def debian(self, release: str) -> str:
        """Make an image of Debian with no more than its packages need, from where this machine has its own packages."""
        sources = [str(path) for path in Path("/etc/apt/sources.list.d").glob("debian.sources")]
        archive = self.folder / "debian.tar"
        make = [tool("mmdebstrap"), "--variant=minbase", "--quiet", release, str(archive), *sources]
        done = subprocess.run(make, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        container = self("from", "scratch")
        self("add", "--quiet", container, str(archive), "/")
        self("commit", "--quiet", "--rm", container, "localhost/base")
        return "localhost/base"


@dataclass(frozen=True)
class Container:
    """A container of an image, and its root folder here."""

    store: Store
    name: str
    root: Path

    def run(self, argv: Sequence[str], *, alone: bool = False) -> subprocess.CompletedProcess[str]:
        """Run a command as the image's user, in its folder, with its environment; `alone`: on a network of its own."""
        network = "none" if alone else "host"
        return self.store.run(
            "run", "--isolation=oci", "--runtime=runc", f"--network={network}", self.name, "--", *argv
        )


def needed() -> None:
    """Look whether images can be built here.

    Errors:
        UnavailableError: what is missing.
    """
    if os.geteuid():
        raise UnavailableError("not root")
    for name in ("mmdebstrap", "buildah", "runc"):
        tool(name)
