"""Run the plan of a build: the steps that ``--dry-run`` prints, except those with existing results.

On disk, under ``~/.cache/hvdtrain/horovod``: ``KEY/`` with a finished wheel, ``KEY.log``, ``sdist/``, and during a
build ``KEY.build/``. A complete wheel is renamed into place. A killed build leaves ``KEY.build``, which the next build
removes. Builds run one at a time; the kernel releases the lock even after kill -9.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import shlex
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import TextIO
from urllib.parse import unquote

from hvdtrain.errors import BuildError
from hvdtrain.files import fsync, is_private
from hvdtrain.install import record
from hvdtrain.install.build_plan import DROPPED_PREFIXES, SDIST_SHA256, BuildPlan, proof_step
from hvdtrain.install.build_probe import find_mpi
from hvdtrain.install.prerequisites import NEEDED_BYTES, OTHER_CACHE, Probe
from hvdtrain.install.record import BUILD_COMMAND, PROVE_NOW, installed
from hvdtrain.install.steps import Say, Step, run, timed

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)


def build(
    plan: BuildPlan, environ: Mapping[str, str], say: Say, progress: Say = lambda text: None, *, prove: bool = True
) -> None:
    """Run the remaining steps of a plan. Afterwards its wheel is installed and, where `prove` is set, tested.

    `say` prints a line; `progress` prints a text over the previous one, during a long step. Errors: BuildError if a
    step failed; the log has details.
    """
    try:
        with _locked(plan, say), plan.log.open("w") as log:
            try:
                for step in pending(plan, prove=prove):
                    with timed(step, say):
                        _run_step(plan, step, _base(environ), log, progress)
            finally:
                shutil.rmtree(plan.scratch, ignore_errors=True)
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        raise BuildError(
            f"{error.filename or plan.cache} cannot be written: {error.strerror}.",
            expected=f"{NEEDED_BYTES / 2**30:.1f} GiB in {plan.cache}; a quota may leave less than the disk has",
            next_step=OTHER_CACHE,
        ) from error


def prove(probe: Probe, environ: Mapping[str, str], say: Say) -> None:
    """Test the installed Horovod, without what a build needs. Errors: BuildError if the sum is wrong or missing."""
    found, mpi = installed(), probe.mpi or find_mpi(environ, to_build=False)
    if found is None or mpi is None:
        what = "Horovod is not installed." if found is None else "No MPI was found to start the ranks of the test."
        raise BuildError(what, next_step=BUILD_COMMAND if found is None else "load the module of Horovod's MPI")
    if not record.can_prove(mpi, environ):
        raise BuildError(
            f"{mpi.build} has no mpirun, and srun needs an allocation.", next_step=f"salloc -n2 {PROVE_NOW}"
        )
    folder = Path(mkdtemp(prefix="hvdtrain-test-"))
    step = proof_step(probe, mpi)
    with timed(step, say), (folder / "log").open("w") as log:
        output = run(step, {**_base(environ), **record.proof_environment(probe, mpi)}, folder, log, lambda text: None)
        record.check_proof(output)
    (probe.python.site / record.MARK).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _base(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if not name.startswith(DROPPED_PREFIXES)}


def pending(plan: BuildPlan, *, prove: bool = True) -> tuple[Step, ...]:
    """Return the steps without existing results. The test runs if `prove` is true and it is possible here.

    Errors: BuildError if the wheel in the cache cannot be trusted.
    """
    found = installed()
    source = unquote(found.source or "") if found is not None and found.version == plan.version else ""
    # The path of the MPI is in the key, not in the version.
    is_installed = source.endswith(f"/{plan.key}/{plan.wheel.name}")
    done = {"proof": not (prove and plan.provable), "install": is_installed}
    done["compile"] = done["toolkit"] = done["install"] or _is_ours(plan.wheel)
    done["sdist"] = done["compile"] or digest(plan.sdist) == SDIST_SHA256
    return tuple(step for step in plan.steps if not done.get(step.name, False))


def _is_ours(wheel: Path) -> bool:
    """Tell whether a wheel is in the cache. Errors: BuildError if another user may have written it."""
    for path in (wheel.parent, wheel):
        try:
            found = path.lstat()
        except FileNotFoundError:
            return False
        if not is_private(found):
            raise BuildError(
                "The cached wheel may be another user's. Installing it would execute the code in it.",
                expected=f"{path} owned by you or root, and writable by nobody else",
                found=f"owner {found.st_uid}, group {found.st_gid}, mode {stat.S_IMODE(found.st_mode):o}",
                next_step="name a cache of your own: export XDG_CACHE_HOME=$HOME/.cache; if it is yours:"
                f" chmod go-w {shlex.quote(str(path))}",
            )
    return True


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
def _locked(plan: BuildPlan, say: Say) -> Iterator[None]:
    """Hold the cache's lock and an empty scratch folder.

    On a file system without locks the scratch folder itself is the lock, which a killed build leaves behind.
    Errors: BuildError if it exists there.
    """
    lock = plan.cache / "lock"
    plan.cache.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"waiting for another build to finish ({lock})")
                fcntl.flock(file, fcntl.LOCK_EX)
            shutil.rmtree(plan.scratch, ignore_errors=True)  # left by a killed build
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            say(f"{plan.cache} is on a file system without locks: do not start a second build")
        try:
            plan.scratch.mkdir()
        except FileExistsError:
            raise BuildError(
                "Another build may be running: the file system of the cache has no locks.",
                found=str(plan.scratch),
                next_step=f"wait for it; if it was killed: rm -r {shlex.quote(str(plan.scratch))}",
            ) from None
        yield


def _run_step(plan: BuildPlan, step: Step, base: Mapping[str, str], log: TextIO, progress: Say) -> None:
    """Run one step and store its result."""
    _prepare(plan)
    if step.name == "install":
        (plan.site / record.MARK).write_text(plan.version + "\n")
    # Not while fetching: with our label in its version, the source is not the one that pip requested.
    own = {"compile": plan.environment, "proof": plan.proof_environment}.get(step.name, ())
    output = run(step, {**base, **dict(own)}, plan.scratch, log, progress)
    if step.name == "sdist":
        fetched = plan.scratch / "sdist" / plan.sdist.name
        check_sdist(fetched)
        plan.sdist.parent.mkdir(exist_ok=True)
        fetched.rename(plan.sdist)
    elif step.name == "toolkit":
        for library in plan.scratch.glob("cuda/nvidia/*/lib/libcudart.so.*"):
            library.with_name("libcudart.so").symlink_to(library.name)  # the name that CMake looks for
            (library.parents[1] / "lib64").symlink_to("lib")  # the folder in which nvcc looks
    elif step.name == "compile":
        made = plan.scratch / "wheel" / plan.wheel.name
        assert made.exists(), f"expected {made.name}, found {[path.name for path in made.parent.iterdir()]}"
        fsync(made)
        shutil.rmtree(plan.wheel.parent, ignore_errors=True)
        made.parent.rename(plan.wheel.parent)
    elif step.name == "proof":
        record.check_proof(output)
        (plan.site / record.MARK).unlink(missing_ok=True)


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
