"""Where a run lives: found, made, claimed and described. Used on rank 0 alone."""

from __future__ import annotations

import errno
import fcntl
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from hvdtrain.config.parse import RunConfig
from hvdtrain.durable import write_text
from hvdtrain.errors import ConfigError, RunDirectoryError, UnusableRunDirectoryError
from hvdtrain.lease import BEAT_S, Lease, take_lease
from hvdtrain.observe.past_journal import is_finished
from hvdtrain.run_layout import RunLayout
from hvdtrain.yaml_file import yaml_text

RUNS = Path("runs")
_NEXT = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room, or give another --run_dir"),
    errno.ENOENT: "put it back (if it is a link: what it leads to), or give another --run_dir",
}


class RunDirectory:
    """A claimed run directory. Claimed until `release`, or the end of the process.

    Args:
        path: exists already.
        lock: the open file whose lock is the claim.
        lease: that is the claim where the file system has no locks.

    Attributes:
        job: what tells the job that claims from all others (`runtime.environment.JOB`); "" where nothing does.
        folder: in which the job was started; the task's code may have changed to another one since.
    """

    job = ""
    folder = Path()

    def __init__(self, path: Path, lock: IO[bytes], lease: Lease | None = None) -> None:
        self.path = path
        self.layout = RunLayout(path)
        self._lock = lock
        self._lease = lease

    def release(self) -> None:
        """Let others claim it."""
        self._lock.close()
        if self._lease is not None:
            self._lease.release()

    @property
    def lost(self) -> bool:
        """Whether another job has claimed it meanwhile, as far as is known."""
        return self._lease is not None and self._lease.lost

    def check(self) -> None:
        """Refuse to go on where another job has claimed it meanwhile: two would write into one run.

        Errors:
            RunDirectoryError: it has.
        """
        if self._lease is not None and self._lease.look():
            raise RunDirectoryError(
                f"another job has taken over {self.path}, and this one ends",
                expected=f"a sign of life in {self.layout.lease} every {BEAT_S:.0f} s: the disk has no locks",
                found="none for so long that this job was taken for dead: it was suspended, or the file system hung",
                next_step="nothing, if the other job is to go on; else stop that one and start this one again",
            )

    def old_config(self) -> Mapping[str, Any] | None:
        """The resolved config that the run had so far, None for a new one."""
        file = self.layout.config
        if not file.exists():
            return None
        try:
            return self.layout.read_config() or None
        except ConfigError as error:
            raise UnusableRunDirectoryError(
                error.what,
                expected="the options of the run so far, as training wrote them",
                next_step=f"mend it, or go on by the options of the command alone: rm {shlex.quote(str(file))}",
            ) from error

    def resumes(self, resume: str) -> str:
        """What the option `resume` means: a job that was started again goes on with what it has done itself."""
        if _is_of_job(self.path, self.job):
            return "auto"
        return resume if resume in ("auto", "never") else str(self.folder / resume)

    def mark(self) -> None:
        """What is here from now on is the work of this job."""
        if self.job:
            write_text(self.layout.job, self.job)

    def write_config(self, run: RunConfig) -> None:
        """Write the resolved config, whole or not at all; as one to go on with, so it resumes by itself.

        Errors:
            RunDirectoryError: a full disk, say.
        """
        try:
            self.mark()
            write_text(self.layout.config, yaml_text({**run.resolved, "resume": "auto"}))
            write_text(self.layout.identity, run.identity())
        except OSError as error:
            raise refusal(f"the run directory {self.path}", error) from error


def claim_run_directory(run: RunConfig, job: str = "", folder: Path = Path()) -> RunDirectory:
    """The run directory of the config: `run_dir`, or the newest unfinished one of the same config, or a new one.

    `job`, `folder`: see `RunDirectory`.

    Errors:
        RunDirectoryError: another job uses it, it cannot be written, or it holds a run that is not to be resumed.
    """
    wanted, never = run.config.run_dir, run.config.resume == "never"
    if wanted is None:
        claimed = _unfinished(run, folder / RUNS) or _new(run, folder / RUNS)
    else:
        claimed = _wanted(folder / wanted, job, never=never)
    claimed.job, claimed.folder = job, folder
    if never:
        claimed.mark()
    return claimed


def refusal(what: str, error: OSError) -> RunDirectoryError:
    """Return the error for a part of a run directory that cannot be used."""
    lasting = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EISDIR)
    return (UnusableRunDirectoryError if lasting else RunDirectoryError)(
        f"{what} cannot be used: {error.strerror or error}",
        next_step=_NEXT.get(error.errno or 0, "give a --run_dir that this user can write to"),
    )


def _wanted(path: Path, job: str, *, never: bool) -> RunDirectory:
    if never and RunLayout(path).journal.exists() and not _is_of_job(path, job):
        raise UnusableRunDirectoryError(
            f"{path} holds a run already, and --resume never would mix another into it",
            next_step="give another --run_dir, or --resume auto to go on with it",
        )
    claimed = _claim(path)
    if claimed is None:
        raise RunDirectoryError(
            f"{path} is in use by another job", next_step="wait for it to end, or give another --run_dir"
        )
    return claimed


def _is_of_job(path: Path, job: str) -> bool:
    try:
        return bool(job) and RunLayout(path).job.read_text() == job
    except OSError:
        return False


def _unfinished(run: RunConfig, runs: Path) -> RunDirectory | None:
    if run.config.resume == "never" or not runs.is_dir():
        return None
    identity = run.identity()
    for path in sorted((p for p in runs.iterdir() if p.is_dir()), key=lambda p: p.name, reverse=True):
        file, log = RunLayout(path).identity, RunLayout(path).journal
        try:
            if file.read_bytes() != identity.encode():
                continue
        except OSError:  # none there, or another user's
            continue
        try:
            if log.exists() and is_finished(log):
                continue
        except OSError as error:
            raise refusal(f"the journal {log}", error) from error
        claimed = _claim(path)
        if claimed is not None:
            return claimed
    return None


def _new(run: RunConfig, runs: Path) -> RunDirectory:
    name = Path(run.config.task.partition(":")[0]).stem
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for attempt in range(1000):
        path = runs / (f"{stamp}-{name}" + (f"-{attempt}" if attempt else ""))
        if not path.exists():
            claimed = _claim(path)
            if claimed is not None:
                return claimed
    raise RunDirectoryError(f"no free name for a run under {runs.resolve()}")


def _claim(path: Path) -> RunDirectory | None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = RunLayout(path).lock.open("ab")
    except OSError as error:
        raise refusal(f"the run directory {path}", error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):  # those: a file system without locks
            raise
        lease = take_lease(RunLayout(path).lease)
        if lease is None:
            lock.close()
            return None
        return RunDirectory(path, lock, lease)
    return RunDirectory(path, lock)
