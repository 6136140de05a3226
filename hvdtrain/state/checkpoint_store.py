"""Checkpoints on disk, each complete or absent, and which one is the best.

A checkpoint is a directory ``step-000100`` with safetensors files, `state.json` and a manifest with their checksums.
It is written under a temporary name in the same folder, fsynced and renamed. Reading verifies every byte.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
import threading
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.errors import CheckpointError, ConfigError, UnreadableCheckpointError, UnwrittenCheckpointError
from hvdtrain.files import fsync
from hvdtrain.state.manifest import MANIFEST as MANIFEST
from hvdtrain.state.manifest import VALUES, detect_unreadable, manifest_text, read_manifest, read_state, verify
from hvdtrain.state.pieces import StateDict
from hvdtrain.state.shard_files import (
    INDEX,
    Abandoned,
    ShardedWrite,
    discard,
    index_of,
    is_being_written,
    request_shards,
    temporary_name,
    write_shard,
)
from hvdtrain.state.stored_file import FileDigest, damaged
from hvdtrain.state.tensor_file import write_bytes


@dataclass(frozen=True)
class Measure:
    """The held-out loss or a metric of the task, and whether more of it is better."""

    name: str = "loss"
    more: bool = False

    @classmethod
    def parse(cls, text: str) -> Measure:
        """Read ``NAME``, ``NAME:min`` or ``NAME:max``. Errors: ConfigError."""
        name, _, direction = text.partition(":")
        if not name or direction not in ("", "min", "max"):
            raise ConfigError(
                f"invalid --checkpoint.best {text!r}",
                expected="loss, or a metric of the task and what is better: accuracy:max",
            )
        return cls(name, direction == "max")

    def score(self, loss: float | None, metrics: Mapping[str, float]) -> float | None:
        """Return a number that is lower for a better evaluation; None without a finite value."""
        value = loss if self.name == "loss" else metrics.get(self.name)
        if value is None or not math.isfinite(value):
            return None
        return -value if self.more else value

    def check(self, metrics: Mapping[str, float]) -> None:
        """Check that evaluations have the value. Errors: ConfigError, on every rank."""
        if self.name != "loss" and self.name not in metrics:
            raise ConfigError(
                f"--checkpoint.best {self.name}: evaluations have no such value", expected=", ".join(["loss", *metrics])
            )


BEST = "best"  # name of the link to the best checkpoint, and of that checkpoint in ``RUN@best``

_NAME = re.compile(r"step-(\d{6,})(?:\.(\d+))?")


@dataclass(frozen=True, order=True)
class Saved:
    """A checkpoint on disk, possibly damaged."""

    step: int  # optimizer steps done
    again: int  # how often the step was saved before, which a resume from an earlier checkpoint causes
    path: Path  # its directory


def saved_at(path: Path) -> Saved | None:
    """Return the checkpoint that the name of a folder says; None if it is not that of a checkpoint."""
    match = _NAME.fullmatch(path.name)
    return None if match is None else Saved(int(match[1]), int(match[2] or 0), path)


@dataclass
class CheckpointStore:
    """The checkpoints of one run. Used only on rank 0."""

    directory: Path  # ``RUN/checkpoints``, created by the first save
    warn: Callable[[str], None]  # shows a warning
    progress: Callable[[], None] = lambda: None  # called for each file and each verified MiB, for the watchdog
    check: Callable[[], None] = lambda: None  # called before each save; raises if another job has taken over the run
    files: Mapping[str, bytes] = field(default_factory=dict)  # further files of each checkpoint; see `Task.files`
    best: Measure = field(default_factory=Measure)  # which checkpoint is kept besides the newest
    is_needed: Callable[[Path], bool] = lambda path: False  # whether a checkpoint must not be removed yet
    fetch: Callable[[str], bool] | None = None  # gets a checkpoint by its name from where it was copied to, if it can

    def list(self) -> list[Saved]:
        """List all checkpoints, oldest first, unverified. Errors: UnreadableCheckpointError."""
        found = []
        with detect_unreadable(self.directory), suppress(FileNotFoundError, NotADirectoryError):
            for entry in os.scandir(self.directory):
                saved = saved_at(self.directory / entry.name)
                if saved is not None and entry.is_dir():
                    found.append(saved)
        return sorted(found)

    def begin(self, step: int, writers: int) -> Path:
        """Create the temporary folder of a checkpoint with this many writers.

        Errors:
            UnwrittenCheckpointError: the disk is full or not writable. The folder is removed.
            Others: those of `check`.
        """
        self.check()
        folder = self.directory / temporary_name(step)
        with self.discard_on_error(step, folder):
            folder.mkdir(parents=True)
            request_shards(folder, writers)
        return folder

    def write(self, write: ShardedWrite, progress: Callable[[], None], abandoned: threading.Event) -> str:
        """Write, wait for the other ranks, complete the checkpoint and return its name.

        Errors: UnwrittenCheckpointError: a rank could not write; Abandoned: the checkpoint is no longer needed.
        """
        try:
            with self.discard_on_error(write.step, write.folder):
                state = write.own_state()
                files = write_shard(write.folder, 0, write.count, state, progress)
                if write.count > 1:
                    files |= write.gather(progress, abandoned)
                path = self.finish(write.folder, write.step, state, write.notes, files)
            if write.keep is not None:
                self.remove_old(write.keep, path, progress)
        except (CheckpointError, Abandoned):
            raise
        except Exception as error:  # a thread would lose it
            raise UnwrittenCheckpointError(
                f"the checkpoint of step {write.step} could not be written: {error!r}"
            ) from error
        return path.name

    def finish(
        self, folder: Path, step: int, state: StateDict, notes: Mapping[str, Any], files: Mapping[str, FileDigest]
    ) -> Path:
        """Complete a checkpoint from the files in `folder`, and return its path. Call in `discard_on_error`.

        It never changes existing checkpoints. `heldout_loss` and `metrics` in `notes` determine the best one.
        """
        texts = {VALUES: json.dumps(dict(state.values)).encode(), **index_of(folder, files), **self.files}
        every = {**files, **{name: write_bytes(folder / name, content) for name, content in texts.items()}}
        write_bytes(folder / MANIFEST, manifest_text(step, notes, every).encode())
        fsync(folder)
        again = max((saved.again + 1 for saved in self.list() if saved.step == step), default=0)
        target = self.directory / (f"step-{step:06d}" + (f".{again}" if again else ""))
        folder.rename(target)
        self._link_best()
        fsync(self.directory)
        return target

    @contextmanager
    def discard_on_error(self, step: int, folder: Path) -> Iterator[None]:
        """Remove the temporary `folder` on an error, and convert an OSError into an UnwrittenCheckpointError."""
        try:
            yield
        except OSError as error:
            discard(folder)
            raise UnwrittenCheckpointError(
                f"the checkpoint of step {step} could not be written: {error.strerror or error}",
                found=f"in {self.directory}",
                next_step="free some space or use another --run_dir; earlier checkpoints are unchanged",
            ) from error
        except BaseException:
            discard(folder)
            raise

    def find_best(self) -> tuple[Saved, float] | None:
        """Return the checkpoint with the lowest score, and the score; None if no checkpoint has one."""
        scored = ((saved, self._score(saved.path)) for saved in self.list())
        return min(((s, score) for s, score in scored if score is not None), key=lambda each: each[1], default=None)

    def _link_best(self) -> None:
        """Make ``checkpoints/best`` a link to the best checkpoint, where the file system has links."""
        found, link, new = self.find_best(), self.directory / BEST, self.directory / ".best"
        with suppress(OSError):
            if found is None:
                link.unlink(missing_ok=True)
                return
            new.unlink(missing_ok=True)
            new.symlink_to(found[0].path.name)
            new.replace(link)

    def load_newest(self, read: Callable[[Path], StateDict] | None = None) -> tuple[Saved, StateDict] | None:
        """Load the newest complete checkpoint, or return None. Of damaged ones, which it warns of, it uses the copy.

        `read`: loads one, with the errors of `load` (default: `load`).

        Errors: UnreadableCheckpointError: a checkpoint cannot be opened. It may be complete.
        """
        read = read or partial(load, progress=self.progress)
        for saved in reversed(self.list()):
            try:
                return saved, read(saved.path)
            except UnreadableCheckpointError:
                raise
            except CheckpointError as error:
                self.warn(f"skipping a checkpoint: {error.what}")
                if self.fetch is not None:
                    self._set_aside(saved.path)
                    if self.fetch(saved.path.name):
                        return saved, read(saved.path)
        return None

    def set_aside_after(self, last: Saved | None) -> None:
        """Rename the checkpoints after `last` (None for all), so that they are neither loaded nor counted.

        They are damaged, or obsolete because an older one was resumed. They stay on disk.
        """
        for saved in self.list():
            if last is None or (saved.step, saved.again) > (last.step, last.again):
                renamed = self._set_aside(saved.path)
                self.warn(f"{saved.path.name} is set aside as {renamed}; remove it if you do not need it")
        self._link_best()

    def _score(self, path: Path) -> float | None:
        try:
            manifest = read_manifest(path)
            return self.best.score(manifest.get("heldout_loss"), manifest.get("metrics") or {})
        except (CheckpointError, TypeError, AttributeError):
            return None

    def _set_aside(self, path: Path) -> Path:
        names = (path.with_name(f"set-aside-{number}-{path.name}") for number in itertools.count())
        return path.rename(next(name for name in names if not name.exists()))

    def remove_old(self, keep: int, just_saved: Path, progress: Callable[[], None] | None = None) -> None:
        """Remove all but the newest `keep` checkpoints, `just_saved`, and the best one.

        Before that it verifies that the disk returns the bytes of `just_saved`.

        Errors: UnwrittenCheckpointError: it does not. `just_saved` is renamed, and nothing is removed.
        """
        every = self.list()
        kept = {just_saved, *(saved.path for saved in every[-keep:])}
        if (best := self.find_best()) is not None:
            kept.add(best[0].path)
        obsolete = [saved.path for saved in every if saved.path not in kept and not self.is_needed(saved.path)]
        if obsolete:
            self._verify(just_saved, progress or self.progress)
        for path in obsolete:
            # Renamed first, because a partly removed directory must not look like a checkpoint.
            path.rename(path.with_name(f".removing-{path.name}"))
        self.clean()

    def clean(self) -> None:
        """Remove partly written or removed checkpoints of killed processes, but no folder that a process writes to."""
        for leftover in [*self.directory.glob(".removing-*"), *self.directory.glob(".writing-*")]:
            if not is_being_written(leftover):
                shutil.rmtree(leftover, ignore_errors=True)

    def _verify(self, path: Path, progress: Callable[[], None]) -> None:
        try:
            with detect_unreadable(path):
                verify(path, progress)
        except UnreadableCheckpointError:
            raise
        except (CheckpointError, OSError, ValueError, KeyError, TypeError) as error:
            self._set_aside(path)
            raise UnwrittenCheckpointError(
                f"{path.name} was written, but the disk returns other bytes",
                found=error.what if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}",
                next_step="check the disk; earlier checkpoints are unchanged",
            ) from error


def load(
    path: Path,
    progress: Callable[[], None] = lambda: None,
    *,
    groups: Container[str] | None = None,
    verifies_all: bool = True,
) -> StateDict:
    """Read and verify one checkpoint, or only these groups of tensors. Tensors are on the CPU.

    For `progress` see `CheckpointStore`, for `verifies_all` `read_state`.

    Errors: CheckpointError: a file is missing, truncated or changed; UnreadableCheckpointError: a file cannot be
    opened.
    """
    with detect_damage(path):
        return read_state(path, progress, groups, verifies_all=verifies_all)


@contextmanager
def detect_damage(path: Path) -> Iterator[None]:
    """Convert what reading a checkpoint may raise. Errors: those of `load`."""
    try:
        with detect_unreadable(path):
            yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise damaged(path, found=f"{type(error).__name__}: {error}") from error


def may_be_added(name: str) -> bool:
    """Return whether a checkpoint can have a further file of this name."""
    own = name in (MANIFEST, VALUES, INDEX) or name.startswith("shard-") or name.endswith(".safetensors")
    return re.fullmatch(r"[A-Za-z][\w.-]*\.[a-z]+", name) is not None and not own
