"""Run a build's plan: what was printed by ``--dry-run``, less the steps whose results are there already.

On disk, under ``~/.cache/hvdtrain/horovod``: ``KEY/`` with a finished wheel, ``KEY.log``, ``sdist/``, and while it
builds ``KEY.build/``. A wheel's folder is renamed into place when it is whole; a killed build leaves ``KEY.build``,
which the next one removes. One build at a time: the lock is released by the kernel, also after kill -9.
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
    """Do what is left of a plan to do: afterwards its wheel is installed and has proved itself.

    Args:
        plan: from `plan.plan`.
        environ: the process's environment.
        say: takes a line for the reader.
        progress: takes a text that replaces the one before, while a long step runs.

    Raises:
        BuildError: a step failed; the log has the rest.
    """
    base = {name: value for name, value in environ.items() if not name.startswith(DROPPED_PREFIXES)}
    with _locked(plan.cache, say), plan.log.open("w") as log:
        shutil.rmtree(plan.scratch, ignore_errors=True)  # of a build that was killed
        try:
            for step in pending(plan):
                with timed(step, say):
                    _do(plan, step, base, log, progress)
        finally:
            shutil.rmtree(plan.scratch, ignore_errors=True)


def pending(plan: BuildPlan) -> tuple[Step, ...]:
    """Give the steps whose results are not there yet. The proof is always run."""
    done = {"proof": False, "install": _is_installed(plan, installed())}
    done["compile"] = done["install"] or plan.wheel.exists()
    done["sdist"] = done["compile"] or digest(plan.sdist) == SDIST_SHA256
    return tuple(step for step in plan.steps if not done.get(step.name, False))


def _is_installed(plan: BuildPlan, record: BuildRecord | None) -> bool:
    """Tell whether this very wheel was installed: another MPI's path is in the key, not in the version."""
    return (
        record is not None
        and record.version == plan.version
        and unquote(record.source or "").endswith(f"/{plan.key}/{plan.wheel.name}")
    )


def check_sdist(path: Path) -> None:
    """Refuse a source of Horovod that is not the released one.

    Raises:
        BuildError: it is another one, or not there.
    """
    found = digest(path)
    if found != SDIST_SHA256:
        raise BuildError(
            "The source of Horovod that the registry gave is not the released one.",
            expected=f"{path.name} with sha256 {SDIST_SHA256}",
            found=found or "no such file",
            next_step="check pip's index-url and find-links",
        )


def digest(path: Path) -> str | None:
    """Give a file's SHA-256; None when there is no such file."""
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


def _do(plan: BuildPlan, step: Step, base: Mapping[str, str], log: TextIO, progress: Say) -> None:
    """Run one step and take its result."""
    _prepare(plan)
    # Not while fetching: a source whose version carries our label is not the one that pip was asked for.
    own = {"compile": plan.environment, "proof": plan.proof_environment}.get(step.name, ())
    output = run(step, {**base, **dict(own)}, plan.scratch, log, progress)
    if step.name == "sdist":
        _keep_sdist(plan)
    elif step.name == "compile":
        _keep_wheel(plan)
    elif step.name == "proof":
        proof.judge(output)


def _prepare(plan: BuildPlan) -> None:
    """Make the scratch folder that the steps work in."""
    for folder in ("tmp", "wheel", "sdist", "nccl/lib"):
        (plan.scratch / folder).mkdir(parents=True, exist_ok=True)
    wrapper = plan.scratch / "cxx"
    wrapper.write_text(plan.wrapper)
    wrapper.chmod(0o755)
    for name, target in plan.nccl_links:
        link = plan.scratch / name
        link.unlink(missing_ok=True)
        link.symlink_to(target)


def _keep_sdist(plan: BuildPlan) -> None:
    fetched = plan.scratch / "sdist" / plan.sdist.name
    check_sdist(fetched)
    plan.sdist.parent.mkdir(exist_ok=True)
    fetched.rename(plan.sdist)


def _keep_wheel(plan: BuildPlan) -> None:
    made = plan.scratch / "wheel" / plan.wheel.name
    assert made.exists(), f"expected {made.name}, found {[path.name for path in made.parent.iterdir()]}"
    with made.open("rb") as file:
        os.fsync(file.fileno())
    shutil.rmtree(plan.wheel.parent, ignore_errors=True)
    made.parent.rename(plan.wheel.parent)
