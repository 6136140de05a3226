"""Run the plan of a build: the steps that ``--dry-run`` prints, except those with existing results.

On disk, under ``~/.cache/hvdtrain/horovod``: ``KEY/`` with a finished wheel, ``KEY.log``, ``sdist/``, and during a
build ``KEY.build/``. A complete wheel is renamed into place. A killed build leaves ``KEY.build``, which the next build
removes. Builds run one at a time; the kernel releases the lock even after kill -9.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO
from urllib.parse import unquote

from hvdtrain.errors import BuildError
from hvdtrain.install import proof
from hvdtrain.install.build_plan import DROPPED_PREFIXES, SDIST_SHA256, BuildPlan
from hvdtrain.install.record import BuildRecord, installed
from hvdtrain.install.steps import Say, Step, run, timed


def build(plan: BuildPlan, environ: Mapping[str, str], say: Say, progress: Say = lambda text: None) -> None:
    """Run the remaining steps of a plan. Afterwards its wheel is installed and tested.

    `say` prints a line; `progress` prints a text over the previous one, during a long step. Errors: BuildError if a
    step failed; the log has details.
    """
    base = {name: value for name, value in environ.items() if not name.startswith(DROPPED_PREFIXES)}
    with _locked(plan.cache, say), plan.log.open("w") as log:
        shutil.rmtree(plan.scratch, ignore_errors=True)  # left by a killed build
        try:
            for step in pending(plan):
                with timed(step, say):
                    _run_step(plan, step, base, log, progress)
        finally:
            shutil.rmtree(plan.scratch, ignore_errors=True)


def pending(plan: BuildPlan) -> tuple[Step, ...]:
    """Return the steps without existing results. The test of the build always runs."""
    done = {"proof": False, "install": _is_installed(plan, installed())}
    done["compile"] = done["install"] or plan.wheel.exists()
    done["sdist"] = done["compile"] or digest(plan.sdist) == SDIST_SHA256
    return tuple(step for step in plan.steps if not done.get(step.name, False))


def _is_installed(plan: BuildPlan, record: BuildRecord | None) -> bool:
    """Tell whether exactly this wheel is installed. The path of the MPI is in the key, not in the version."""
    return (
        record is not None
        and record.version == plan.version
        and unquote(record.source or "").endswith(f"/{plan.key}/{plan.wheel.name}")
    )


def check_sdist(path: Path) -> None:
    """Check that a file is the released source of Horovod. Errors: BuildError if it is another file, or missing."""
    found = digest(path)
    if found != SDIST_SHA256:
        raise BuildError(
            "the Horovod source from the package registry has an unexpected checksum",
            expected=f"{path.name} with sha256 {SDIST_SHA256}",
            found=found or "no such file",
            next_step="check pip's index-url and find-links",
        )


def digest(path: Path) -> str | None:
    """Return the SHA-256 of a file, or None if it does not exist."""
    if not path.exists():
        return None
    found = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            found.update(part)
    return found.hexdigest()


@contextmanager
def _locked(cache: Path, say: Say) -> Iterator[None]:
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say(f"waiting for another build to finish ({cache / 'lock'})")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run_step(plan: BuildPlan, step: Step, base: Mapping[str, str], log: TextIO, progress: Say) -> None:
    """Run one step and store its result."""
    _prepare(plan)
    # Not while fetching: with our label in its version, the source is not the one that pip requested.
    own = {"compile": plan.environment, "proof": plan.proof_environment}.get(step.name, ())
    output = run(step, {**base, **dict(own)}, plan.scratch, log, progress)
    if step.name == "sdist":
        _store_sdist(plan)
    elif step.name == "compile":
        _store_wheel(plan)
    elif step.name == "proof":
        proof.check_output(output)


def _prepare(plan: BuildPlan) -> None:
    """Create the scratch folder of the steps."""
    for folder in ("tmp", "wheel", "sdist", "nccl/lib"):
        (plan.scratch / folder).mkdir(parents=True, exist_ok=True)
    wrapper = plan.scratch / "cxx"
    wrapper.write_text(plan.wrapper)
    wrapper.chmod(0o755)
    for name, target in plan.nccl_links:
        link = plan.scratch / name
        link.unlink(missing_ok=True)
        link.symlink_to(target)


def _store_sdist(plan: BuildPlan) -> None:
    fetched = plan.scratch / "sdist" / plan.sdist.name
    check_sdist(fetched)
    plan.sdist.parent.mkdir(exist_ok=True)
    fetched.rename(plan.sdist)


def _store_wheel(plan: BuildPlan) -> None:
    made = plan.scratch / "wheel" / plan.wheel.name
    assert made.exists(), f"expected {made.name}, found {[path.name for path in made.parent.iterdir()]}"
    with made.open("rb") as file:
        os.fsync(file.fileno())
    shutil.rmtree(plan.wheel.parent, ignore_errors=True)
    made.parent.rename(plan.wheel.parent)
