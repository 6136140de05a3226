"""Checkpoints on disk: whole or not there.

A checkpoint is a directory ``step-000100`` of safetensors files, `state.json` and a manifest with a checksum a file.
It is written under a temporary name beside its place, fsynced and renamed. Reading verifies every byte.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.durable import fsync
from hvdtrain.errors import CheckpointError, UnreadableCheckpointError
from hvdtrain.state.manifest import MANIFEST as MANIFEST
from hvdtrain.state.manifest import VALUES, manifest_text, read_manifest, read_state, readable, verify
from hvdtrain.state.tensor_file import Facts, write_text
from hvdtrain.state.train_state import StateDict
from hvdtrain.state.writing import want_shards, write_shard

_NAME = re.compile(r"step-(\d{6,})(?:\.(\d+))?")
_TEMPORARY = re.compile(r"\.writing-step-\d+-[0-9a-f]+-(\d+)-(.+)")
_SILENT_S = 900.0
"""A temporary folder of another host in which nothing has changed for so long is nobody's."""


@dataclass(frozen=True, order=True)
class Saved:
    """A checkpoint that is on disk, whole or not.

    Attributes:
        step: optimizer steps done.
        again: 0, or counted up where the step was saved again after a resume from before it.
        path: its directory.
    """

    step: int
    again: int
    path: Path


class CheckpointStore:
    """The checkpoints of one run; used on rank 0 alone.

    Args:
        directory: ``RUN/checkpoints``, made when the first is saved.
        warn: told of what was passed over.
        progress: called with each file, and each MiB of it that is verified, so that who watches sees it go on.
        check: called before each save: raises where the run is no longer this job's.
    """

    def __init__(
        self,
        directory: Path,
        warn: Callable[[str], None],
        progress: Callable[[], None] = lambda: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.directory = directory
        self._before_save = check
        self.progress = progress
        self._warn = warn

    def list(self) -> list[Saved]:
        """All checkpoints, oldest first, unverified. Errors: UnreadableCheckpointError: see `readable`."""
        found = []
        with readable(self.directory), suppress(FileNotFoundError, NotADirectoryError):
            for entry in os.scandir(self.directory):
                match = _NAME.fullmatch(entry.name)
                if match and entry.is_dir():
                    found.append(Saved(int(match[1]), int(match[2] or 0), self.directory / entry.name))
        return sorted(found)

    def save(self, step: int, state: StateDict, notes: Mapping[str, Any]) -> Path:
        """Write a checkpoint; its path. Nothing that was there before is touched, whatever happens.

        Args:
            step: optimizer steps done.
            state: tensors on any device.
            notes: plain values for the manifest (`heldout_loss` decides which checkpoint is the best).

        Errors:
            CheckpointError: the disk is full or cannot be written; the temporary directory is removed.
        """
        folder = self.begin(step, 1)
        with self.writing(step, folder):
            files = write_shard(folder, 0, 1, state, self.progress)
            return self.finish(folder, step, state.values, notes, files)

    def begin(self, step: int, writers: int) -> Path:
        """Make the temporary folder that a checkpoint is written into by so many ranks. Errors: see `save`, `check`."""
        self._before_save()
        folder = (
            self.directory / f".writing-step-{step:06d}-{secrets.token_hex(4)}-{os.getpid()}-{socket.gethostname()}"
        )
        with self.writing(step, folder):
            folder.mkdir(parents=True)
            want_shards(folder, writers)
        return folder

    def finish(
        self, folder: Path, step: int, values: Mapping[str, Any], notes: Mapping[str, Any], files: Mapping[str, Facts]
    ) -> Path:
        """Make the checkpoint of what was written into the temporary `folder`; its path. Inside of `writing`."""
        every = {**files, VALUES: write_text(folder / VALUES, json.dumps(dict(values)))}
        write_text(folder / MANIFEST, manifest_text(step, notes, every))
        fsync(folder)
        target = self._free_name(step)
        folder.rename(target)
        fsync(self.directory)
        return target

    @contextmanager
    def writing(self, step: int, folder: Path) -> Iterator[None]:
        """Of what fails inside nothing is left in the temporary `folder`; an OSError becomes a CheckpointError."""
        try:
            yield
        except OSError as error:
            _discard(folder)
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written: {error.strerror or error}",
                found=f"in {self.directory}",
                next_step="make room or give another --run_dir; earlier checkpoints are untouched",
            ) from error
        except BaseException:
            _discard(folder)
            raise

    def load_newest(self) -> tuple[Saved, StateDict] | None:
        """The newest checkpoint that is whole; damaged ones are named and passed over. None where there is none.

        Errors:
            UnreadableCheckpointError: one cannot be opened, and may be whole.
        """
        for saved in reversed(self.list()):
            try:
                state = load(saved.path, self.progress)
                _check_step(saved)
                return saved, state
            except UnreadableCheckpointError:
                raise
            except CheckpointError as error:
                self._warn(f"passing over a checkpoint: {error.what}")
        return None

    def set_aside_after(self, last: Saved | None) -> None:
        """Rename what is newer than `last` (None: everything), so that it is neither loaded nor counted any more.

        These are damaged, or of a way that was left when an older one was resumed. They stay on disk.
        """
        for saved in self.list():
            if last is None or (saved.step, saved.again) > (last.step, last.again):
                place = self._set_aside(saved.path)
                self._warn(f"{saved.path.name} is set aside as {place}; remove it when you don't need it")

    def _set_aside(self, path: Path) -> Path:
        names = (path.with_name(f"set-aside-{number}-{path.name}") for number in itertools.count())
        place = next(name for name in names if not name.exists())
        path.rename(place)
        return place

    def retain(self, keep: int, just_saved: Path, progress: Callable[[], None] | None = None) -> None:
        """Remove all but the newest `keep` checkpoints, `just_saved`, and the one with the lowest held-out loss.

        Before any is removed `just_saved` is read and verified: what the disk gives back has to be what was written.

        Errors:
            CheckpointError: it is not; it is set aside, and nothing is removed.
        """
        every = self.list()
        kept = {just_saved, *(saved.path for saved in every[-keep:])}
        losses = [(loss, saved.path) for saved in every if (loss := _heldout_loss(saved.path)) is not None]
        if losses:
            kept.add(min(losses)[1])
        doomed = [saved.path for saved in every if saved.path not in kept]
        if doomed:
            self._check(just_saved, progress or self.progress)
        for path in doomed:
            # Renamed first: a directory that is removed half way must not look like a checkpoint.
            path.rename(path.with_name(f".removing-{path.name}"))
        self.clean()

    def clean(self) -> None:
        """Remove what killed processes left half written or half removed; not what a living one is writing."""
        for leftover in [*self.directory.glob(".removing-*"), *self.directory.glob(".writing-*")]:
            if not _is_being_written(leftover):
                shutil.rmtree(leftover, ignore_errors=True)

    def _check(self, path: Path, progress: Callable[[], None]) -> None:
        try:
            with readable(path):
                verify(path, progress)
        except UnreadableCheckpointError:
            raise
        except (CheckpointError, OSError, ValueError, KeyError, TypeError) as error:
            self._set_aside(path)
            raise CheckpointError(
                f"{path.name} was written, and the disk gives back something else",
                found=error.what if isinstance(error, CheckpointError) else repr(error),
                next_step="look after the disk; earlier checkpoints are untouched",
            ) from error

    def _free_name(self, step: int) -> Path:
        again = max((saved.again + 1 for saved in self.list() if saved.step == step), default=0)
        return self.directory / (f"step-{step:06d}" + (f".{again}" if again else ""))


def load(path: Path, progress: Callable[[], None] = lambda: None) -> StateDict:
    """Read and verify one checkpoint; tensors on the CPU. `progress`: see `CheckpointStore`.

    Errors:
        CheckpointError: a file is missing, was cut, or holds other bytes than were written.
        UnreadableCheckpointError: a file cannot be opened.
    """
    try:
        with readable(path):
            return read_state(path, progress)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise CheckpointError(
            f"{path} is damaged", found=repr(error), next_step="resume from another checkpoint"
        ) from error


def _check_step(saved: Saved) -> None:
    step = read_manifest(saved.path).get("step")
    if step != saved.step:
        raise CheckpointError(f"{saved.path} is of another step", expected=str(saved.step), found=str(step))


def _heldout_loss(path: Path) -> float | None:
    try:
        loss = read_manifest(path).get("heldout_loss")
    except CheckpointError:
        return None
    return loss if isinstance(loss, float) else None


def _discard(folder: Path) -> None:
    """Remove a temporary folder. Renamed first, so that other ranks make no more files in it."""
    doomed = folder.with_name(f".removing-{folder.name}")
    with suppress(OSError):
        folder.rename(doomed)
    for path in (doomed, folder):
        shutil.rmtree(path, ignore_errors=True)


def _is_being_written(folder: Path) -> bool:
    """Whether a process that lives, this one included, is writing into a temporary folder."""
    match = _TEMPORARY.fullmatch(folder.name)
    if match is None:
        return False
    if match[2] == socket.gethostname():
        return Path(f"/proc/{match[1]}").exists()
    with suppress(OSError):
        return time.time() - max(path.stat().st_mtime for path in (folder, *folder.iterdir())) < _SILENT_S
    return False
