"""Find or make the run folder, claim it, and write its config. Used on rank 0 only."""

from __future__ import annotations

import errno
import fcntl
import os
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hvdtrain.config.parse import RunConfig, list_changes
from hvdtrain.errors import ConfigError, HvdtrainError, RunDirectoryError, UnusableRunDirectoryError
from hvdtrain.files import read_text_or_empty, write_text
from hvdtrain.lease import BEAT_S, Lease, take_lease
from hvdtrain.observe.past_journal import is_finished
from hvdtrain.run_layout import RunLayout
from hvdtrain.state.checkpoint_store import MANIFEST, CheckpointStore
from hvdtrain.state.stored_run import StoredRun
from hvdtrain.yaml_file import yaml_text

RUNS = Path("runs")
_FEW = 3  # options in which a run may differ from one that the user may have meant to continue
_NEWEST = 20  # runs that are looked at for this
_NEXT = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room on the disk, or give another --run_dir"),
    errno.ENOENT: "restore it (if it is a link: its target), or give another --run_dir",
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), "remove the file of that name, or give another --run_dir"),
}


@dataclass
class RunDirectory:
    """A claimed run folder; the claim lasts until `release`, or the end of the process."""

    path: Path  # of the folder, which exists
    lock: IO[bytes]  # open file; its lock is the claim
    lease: Lease | None  # the claim if the file system has no locks
    job: str  # identifies the claiming job (`runtime.environment.JOB`); "" if nothing does
    folder: Path  # in which the job was started; the task's code may have changed the current folder since
    remark: str = ""  # on a new run, for the user; "" for none
    stored: StoredRun | None = None  # the copy of the run on a store
    store_lease: Lease | None = None  # the claim to that copy

    @property
    def layout(self) -> RunLayout:
        """Paths in the folder."""
        return RunLayout(self.path)

    def release(self) -> None:
        """Release the claim."""
        self.lock.close()
        for lease in (self.lease, self.store_lease):
            if lease is not None:
                lease.release()

    @property
    def lost(self) -> bool:
        """Whether another job is known to have claimed the folder since."""
        return any(lease is not None and lease.lost for lease in (self.lease, self.store_lease))

    def check(self) -> None:
        """Refuse to continue if another job has claimed the folder, or could: two jobs would write into one run.

        Errors: RunDirectoryError: another job has claimed it, or it was moved or removed.
        """
        held = os.fstat(self.lock.fileno())
        try:
            now = self.layout.lock.stat()
        except OSError:
            now = None
        if now is None or (now.st_dev, now.st_ino) != (held.st_dev, held.st_ino):
            moved, there = held.st_nlink > 0, str(Path(f"/proc/self/fd/{self.lock.fileno()}").readlink().parent)
            raise RunDirectoryError(
                f"{self.path} was {'moved' if moved else 'removed'} while this job trained into it; this job ends",
                found=f"its files until now are in {there}" if moved else "nothing is left of its files",
                next_step=f"to continue: --run_dir {shlex.quote(there)}" if moved else "start again, in a new folder",
            )
        if self.store_lease is not None and self.store_lease.lost and self.stored is not None:
            raise RunDirectoryError(
                f"another job has taken over {self.stored.url}; this job ends",
                expected="a heartbeat on the store from one job at a time",
                found="no heartbeat for so long that this job seemed dead: it was suspended, or cut off from the store",
                next_step="nothing, if the other job should continue; else give this job another --checkpoint.to",
            )
        if self.lease is not None and self.lease.check():
            raise RunDirectoryError(
                f"another job has taken over {self.path}; this job ends",
                expected=f"a heartbeat in {self.layout.lease} every {BEAT_S:.0f} s: the file system has no locks",
                found="no heartbeat for so long that this job seemed dead: it was suspended, or the file system hung",
                next_step="nothing, if the other job should continue; otherwise stop it and start this one again",
            )

    def old_config(self) -> Mapping[str, Any] | None:
        """Return the resolved config of the run so far; None for a new run."""
        file = self.layout.config
        if not file.exists():
            return None
        try:
            return self.layout.read_config() or None
        except ConfigError as error:
            raise UnusableRunDirectoryError(
                error.what,
                expected="the options of the run, as training wrote them",
                next_step=f"repair it, or resume with only the options of the command: rm {shlex.quote(str(file))}",
            ) from error

    def resolve_resume(self, resume: str) -> str:
        """Return what the option `resume` means here: a restarted job continues from its own checkpoints."""
        if _is_of_job(self.path, self.job):
            return "auto"
        return resume if resume in ("auto", "never") else str(self.folder / resume)

    def mark_job(self) -> None:
        """Record that this job has written to the folder."""
        if self.job:
            write_text(self.layout.job, self.job)

    def write_config(self, run: RunConfig) -> None:
        """Write the resolved config, atomically, with `resume: auto`, so that it resumes this run.

        Errors: RunDirectoryError: the disk is full, for example.
        """
        try:
            self.mark_job()
            write_text(self.layout.config, yaml_text({**run.resolved, "resume": "auto"}))
            write_text(self.layout.identity, run.identity())
        except OSError as error:
            raise unusable(f"the run folder {self.path}", error) from error


def claim_run_directory(run: RunConfig, job: str = "", folder: Path = Path()) -> RunDirectory:
    """Claim the run folder of a config: `run_dir`, else the newest unfinished one of the same config, else a new one.

    `job`, `folder`: see `RunDirectory`.

    Errors:
        RunDirectoryError: another job uses it, it cannot be written, or it has a run that must not be resumed.
        ConfigError: `resume` names no checkpoint, and the run has none of its own. Nothing is written.
    """
    wanted, never = run.config.run_dir, run.config.resume == "never"
    if wanted is None:
        claimed = _unfinished(run, job, folder)
        if claimed is None:
            _check_source(run, folder)
            claimed = _new(run, job, folder)
            claimed.remark = _earlier(run, folder, claimed.path)
    else:
        path = folder / wanted
        if not _is_of_job(path, job):
            _check_source(run, folder)
            if never and RunLayout(path).journal.exists():
                raise UnusableRunDirectoryError(
                    f"{path} already has a run, and --resume never would mix another run into it",
                    next_step="give another --run_dir, or --resume auto to resume the run",
                )
        claimed = _claim(path, job, folder)
        if claimed is None:
            raise RunDirectoryError(
                f"{path} is in use by another job", next_step="wait for it to end, or give another --run_dir"
            )
    if never:
        claimed.mark_job()
    return claimed


def unusable(what: str, error: OSError) -> RunDirectoryError:
    """Return the error for a part of a run folder that cannot be used."""
    lasting = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EISDIR)
    return (UnusableRunDirectoryError if lasting else RunDirectoryError)(
        f"{what} cannot be used: {error.strerror or error}",
        next_step=_NEXT.get(error.errno or 0, "give a --run_dir that this user can write to"),
    )


def _check_source(run: RunConfig, folder: Path) -> None:
    resume, own = run.config.resume, run.config.run_dir
    place = folder / resume
    if resume in ("auto", "never") or (place / MANIFEST).exists():
        return
    for there in (place, *([folder / own] if own else [])):
        if CheckpointStore(RunLayout(there).checkpoints, lambda line: None).list():
            return
    found = "a file" if place.is_file() else "no such folder"
    if place.is_dir():
        found = f"a folder without {MANIFEST} and without checkpoints/step-..."
    raise ConfigError(
        f"invalid --resume: {resume!r} contains no checkpoint",
        expected="auto, never, a checkpoint such as RUN/checkpoints/step-000100, or a run folder",
        found=found,
    )


def _is_of_job(path: Path, job: str) -> bool:
    return bool(job) and read_text_or_empty(RunLayout(path).job) == job


def _unfinished(run: RunConfig, job: str, folder: Path) -> RunDirectory | None:
    runs = folder / RUNS
    if run.config.resume == "never" or not runs.is_dir():
        return None
    identity = run.identity()
    for path in sorted((p for p in runs.iterdir() if p.is_dir()), key=lambda p: p.name, reverse=True):
        file, log = RunLayout(path).identity, RunLayout(path).journal
        if read_text_or_empty(file) != identity:  # or it is missing, or another user's
            continue
        try:
            if log.exists() and is_finished(log):
                continue
        except OSError as error:
            raise unusable(f"the journal {log}", error) from error
        claimed = _claim(path, job, folder)
        if claimed is not None:
            return claimed
    return None


def _earlier(run: RunConfig, folder: Path, new: Path) -> str:
    """Return a line about the run from which a new one differs in the fewest options, if it has few of them."""
    found: list[tuple[int, str]] = []
    if run.config.resume == "never":
        return ""
    for path in sorted((p for p in (folder / RUNS).iterdir() if p.is_dir() and p != new), reverse=True)[:_NEWEST]:
        layout = RunLayout(path)
        try:
            old, saved = layout.read_config(), CheckpointStore(layout.checkpoints, lambda line: None).list()
        except (OSError, HvdtrainError):
            continue
        changes = list_changes(old, run.resolved)
        if saved and 0 < len(changes) <= _FEW and not any(line.startswith("task:") for line in changes):
            place, length = path.relative_to(folder), old.get("train", {}).get("steps")
            other = f"{place} has step {saved[-1].step} of {length} with other options: {'; '.join(changes)}"
            found.append(
                (len(changes), f"a new run; {other}. To continue that one: --run_dir {shlex.quote(str(place))}")
            )
    return min(found, key=lambda each: each[0])[1] if found else ""


def _new(run: RunConfig, job: str, folder: Path) -> RunDirectory:
    runs = folder / RUNS
    name = Path(run.config.task.partition(":")[0]).stem
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for attempt in range(1000):
        path = runs / (f"{stamp}-{name}" + (f"-{attempt}" if attempt else ""))
        if not path.exists():
            claimed = _claim(path, job, folder)
            if claimed is not None:
                return claimed
    raise RunDirectoryError(f"no free name for a run in {runs.resolve()}")


def _claim(path: Path, job: str = "", folder: Path = Path()) -> RunDirectory | None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        # Who may read a file may lock it.
        number = os.open(RunLayout(path).lock, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        lock = os.fdopen(number, "ab")
        if os.fstat(number).st_uid == os.geteuid():
            os.fchmod(number, 0o600)
    except OSError as error:
        raise unusable(f"the run folder {path}", error) from error
    lease = None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):  # a file system without locks
            raise
        lease = take_lease(RunLayout(path).lease)
        if lease is None:
            lock.close()
            return None
    return RunDirectory(path, lock, lease, job, folder)
