"""Run pip for a bundle: fetch wheels for another machine, build hvdtrain's wheel, fetch Horovod's source."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from packaging.requirements import Requirement

from hvdtrain.errors import BuildError
from hvdtrain.install.build_plan import DROPPED_PREFIXES, fetch_step
from hvdtrain.install.steps import OFFLINE, Step, run
from hvdtrain.install.target import Target

_OWN = ("setup.py", "setup.cfg", "README.md", "LICENSE")
_EPOCH = "315532800"  # 1980-01-01, the earliest date of a zip file. A fixed date makes wheels reproducible


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
        doing = f"fetching {requirement}"
        fetched = self._new_folder("wheel")
        step = Step("wheel", doing, "seconds", self._argv("download", *flags, "--dest", str(fetched), str(requirement)))
        try:
            self._run(step)
        except BuildError as error:
            if "No matching distribution" not in (error.found or "") or OFFLINE in (error.next_step or ""):
                raise
            none = "from versions: none" in (error.found or "")
            raise BuildError(
                f"There is no wheel of {requirement} for Python {target.python} on {target.platform}.",
                found="no wheel of any version" if none else "only wheels of other versions",
                next_step=f"{_ADVICE.get(requirement.name, _OTHER)}   (log: {self._log.name})",
            ) from error
        (wheel,) = fetched.iterdir()
        return wheel

    def download_sdist(self) -> Path:
        """Fetch Horovod's source."""
        fetched = self._new_folder("sdist")
        self._run(fetch_step(sys.executable, fetched))
        (sdist,) = fetched.iterdir()
        return sdist

    def build(self, project: Path) -> Path:
        """Build hvdtrain's wheel from a copy of its sources, which leaves the project unchanged."""
        source, built = self._new_folder("source"), self._new_folder("own")
        for name in _OWN:
            shutil.copy(project / name, source)
        shutil.copytree(project / "hvdtrain", source / "hvdtrain", ignore=shutil.ignore_patterns("__pycache__"))
        flags = ("--no-deps", "--no-build-isolation", "--no-index", "--no-cache-dir", "--wheel-dir", str(built))
        self._run(Step("own", "building hvdtrain's wheel", "5 s", self._argv("wheel", *flags, str(source))))
        (wheel,) = built.iterdir()
        return wheel

    def _argv(self, *words: str) -> tuple[str, ...]:
        return (sys.executable, "-m", "pip", *words)

    def _run(self, step: Step) -> None:
        """Run pip. Errors: BuildError if it failed; OSError if that was because the disk is full."""
        try:
            run(step, self._environ, self.folder, self._log, lambda text: None)
        except BuildError as error:
            for number in (errno.ENOSPC, errno.EDQUOT):
                if os.strerror(number) in (error.found or ""):
                    raise OSError(number, os.strerror(number), str(self.folder)) from error
            raise

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
