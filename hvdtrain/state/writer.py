"""Checkpoints written beside training, by every rank its part: a step waits for a copy in memory alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import on_rank_0
from hvdtrain.errors import CheckpointError, HvdtrainError, UnreadableCheckpointError
from hvdtrain.state.attempt import Attempt
from hvdtrain.state.shards import LEAST_BYTES, shard, writers
from hvdtrain.state.shared import share_files
from hvdtrain.state.snapshot import Snapshot
from hvdtrain.state.store import CheckpointStore
from hvdtrain.state.tensor_file import check_dtypes
from hvdtrain.state.train_state import StateDict
from hvdtrain.state.writing import Abandoned

_FIRST_RETRY_S, _LAST_RETRY_S = 10.0, 600.0
"""From a failed save that is told to the try that is told next: at first; doubled each time up to."""

_PATIENCE_S = 2.0
"""How long a run that has failed waits for a checkpoint that rank 0 alone is writing."""


class CheckpointWriter:
    """Saves the state of a job; on every rank.

    One checkpoint is under way at a time, and its copy is kept in one buffer: a save that comes before the last one is
    on the disk waits for it. A second buffer would cost the memory of the state once more, and help only until the
    disk is behind by two.

    A save that fails, for want of room say, does not end training: it is told, and `look` asks for another some time
    later. One that is due before is tried too; that it fails is told only where the reason is another one.

    Args:
        comm: the ranks.
        store: on rank 0; None elsewhere.
        keep: see `CheckpointStore.retain`.
        event: records an event; of the training thread.
        warn: tells something that a person should know; of the training thread.
        touch: called by the training thread while it waits and the writing goes on.
        least_bytes: a rank does not write less than this.
        clock: seconds.
    """

    def __init__(
        self,
        comm: Comm,
        store: CheckpointStore | None,
        keep: int,
        event: Callable[[dict[str, Any]], None],
        warn: Callable[[str], None],
        touch: Callable[[], None] = lambda: None,
        *,
        least_bytes: int = LEAST_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._comm, self._store, self._keep = comm, store, keep
        self._event, self._warn, self._touch = event, warn, touch
        self._least_bytes, self._clock = least_bytes, clock
        self._shared = False
        self._snapshot = Snapshot()
        self._thread: threading.Thread | None = None
        self._attempt: Attempt | None = None
        self._outcome: str | CheckpointError | None = None
        self._abandoned = threading.Event()
        self._moves = 0
        self._retry_s, self._retry_at = _FIRST_RETRY_S, float("inf")
        self._trouble = self._why = ""

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Find out who can write; at the end wait for what is under way. Collective: yes, at the beginning.

        After an error nobody is waited for: a checkpoint of several writers is given up.
        """
        store = self._store
        self._shared = share_files(self._comm, store.directory.parent if store is not None else None)
        if store is not None:
            store.clean()
        try:
            yield
        except BaseException:
            if self._attempt is not None and self._attempt.count > 1:
                self._abandoned.set()
            self._join(patience_s=_PATIENCE_S)
            self._abandoned.set()
            if self._attempt is not None and isinstance(self._outcome, str):
                with suppress(HvdtrainError):
                    self._saved(self._attempt.step, self._outcome)
            raise
        self._finish()

    def save(
        self, step: int, state: StateDict, notes: Mapping[str, Any], *, wait: bool, urgent: bool = False, why: str = ""
    ) -> None:
        """Save a state, the same on every rank. Collective: yes.

        Args:
            step: optimizer steps done.
            state: read until this returns; it may change then.
            notes: for the manifest.
            wait: return once it is on the disk, and copy nothing.
            urgent: little time is left: old checkpoints are not removed.
            why: stands in the event that says that it is on the disk, where given.

        Errors:
            CheckpointError: on every rank, with `wait`: it could not be written. In any case: it holds a dtype that
                cannot be saved.
        """
        check_dtypes(state)
        self._finish()
        self._why = why
        count = writers(state, self._comm.size, self._least_bytes) if self._shared else 1
        try:
            folder = Path(on_rank_0(self._comm, partial(self._begin, step, count), name="checkpoint/folder"))
        except CheckpointError as error:
            if wait:
                raise
            self._failed(step, error)
            return
        if self._comm.rank < count:
            mine = shard(state, self._comm.rank, count)
            others = state.count - mine.count
            mine = StateDict(mine.tensors, state.values)
            if not wait:
                self._snapshot.take(mine, step)
            take = (lambda: mine) if wait else (lambda: self._snapshot.state)
            self._attempt = Attempt(folder, step, count, take, others, notes, None if urgent else self._keep)
            self._start(wait)
        if wait:
            try:
                name = on_rank_0(self._comm, self._result, name="saved")
            finally:
                self._forget()
            self._saved(step, name)

    def look(self) -> int:
        """Tell what became of the checkpoint under way; 1 where one is to be saved because the last one failed.

        At each step boundary, on every rank. It takes microseconds.
        """
        if self._thread is not None and not self._thread.is_alive():
            self._finish()
        if self._clock() < self._retry_at:
            return 0
        self._retry_at = float("inf")
        return 1

    def wait(self) -> None:
        """Wait for the checkpoint under way, if any, and tell what became of it."""
        self._finish()

    def _begin(self, step: int, count: int) -> str:
        assert self._store is not None
        return str(self._store.begin(step, count).resolve())

    def _start(self, wait: bool) -> None:
        if wait:
            self._write(self._touch)
            return
        self._thread = threading.Thread(target=self._write, args=(lambda: None,), name="checkpoint", daemon=True)
        self._thread.start()

    def _write(self, moved: Callable[[], None]) -> None:
        """What a rank does for a checkpoint, in whatever thread."""
        attempt = self._attempt
        assert attempt is not None

        def progress() -> None:
            self._moves += 1
            moved()
            if self._abandoned.is_set():
                raise Abandoned

        with suppress(Abandoned):
            if self._store is None:
                attempt.follow(self._comm.rank, progress)
                return
            try:
                self._outcome = attempt.lead(self._store, progress, self._abandoned)
            except CheckpointError as error:
                self._outcome = error

    def _result(self) -> str:
        outcome = self._outcome
        if isinstance(outcome, CheckpointError):
            raise outcome
        assert outcome is not None
        return outcome

    def _join(self, patience_s: float = float("inf")) -> None:
        """Wait for the thread; for so long in all."""
        end, seen = time.monotonic() + patience_s, -1
        while self._thread is not None and self._thread.is_alive() and time.monotonic() < end:
            self._thread.join(min(0.1, patience_s))
            if self._moves != seen:
                seen = self._moves
                self._touch()

    def _finish(self) -> None:
        """Wait for the checkpoint under way, if any, and tell what became of it."""
        self._join()
        attempt, outcome = self._attempt, self._outcome
        self._forget()
        if attempt is None:
            return
        if isinstance(outcome, CheckpointError):
            self._failed(attempt.step, outcome)
        elif outcome is not None:
            self._saved(attempt.step, outcome)

    def _forget(self) -> None:
        self._thread = self._attempt = self._outcome = None

    def _saved(self, step: int, name: str) -> None:
        why = "after saves that failed" if self._trouble else self._why
        self._retry_s, self._retry_at, self._trouble = _FIRST_RETRY_S, float("inf"), ""
        self._event({"event": "checkpoint", "at_step": step, "path": name, **({"why": why} if why else {})})

    def _failed(self, step: int, error: CheckpointError) -> None:
        if self._store is None:
            return
        is_promised = self._retry_at == float("inf")
        if is_promised:
            self._retry_at = self._clock() + self._retry_s
            self._retry_s = min(2 * self._retry_s, _LAST_RETRY_S)
        retry_s = max(0.0, self._retry_at - self._clock())
        with suppress(HvdtrainError):  # a full disk takes no line of a journal either
            self._event({"event": "checkpoint_failed", "at_step": step, "error": error.what, "retry_s": retry_s})
        known, self._trouble = self._trouble, error.what.replace(str(step), "")
        if not is_promised and self._trouble == known:
            return
        try:
            newest = self._store.list()[-1:]
        except UnreadableCheckpointError:
            newest = []
        self._warn(
            f"{error.what} ({error.found}): {error.next_step or 'see there'}. Training goes on, and is kept as of"
            f" {f'step {newest[0].step}' if newest else 'no step at all'}; the next try comes with the next save that"
            f" is due, at the latest in {retry_s:.0f} s, and until then the same is not told again"
        )
