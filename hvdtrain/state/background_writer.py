"""Write checkpoints in the background, each rank its part. A training step waits only for a copy in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import on_rank_0
from hvdtrain.errors import CheckpointError, HvdtrainError, UnreadableCheckpointError
from hvdtrain.state.checkpoint_store import CheckpointStore
from hvdtrain.state.pieces import StateDict
from hvdtrain.state.shard_files import MIN_BYTES, Abandoned, ShardedWrite, count_writers, is_folder_shared, select_shard
from hvdtrain.state.snapshot import Snapshot
from hvdtrain.state.tensor_file import check_dtypes
from hvdtrain.state.transfer import gather_pieces

_FIRST_RETRY_S, _LAST_RETRY_S = 10.0, 600.0
"""Delay of the retry after the first failed save, and the limit up to which it doubles."""

_PATIENCE_S = 2.0  # seconds that a failed run waits for a checkpoint that only rank 0 is writing


class CheckpointWriter:
    """Saves the state of a job; one instance on every rank.

    One checkpoint is written at a time, from one buffer. The next save waits until it is on disk. A second buffer
    would need the memory of the state again, and would help only until the disk is behind by two.

    A failed save, such as on a full disk, does not end training: it is reported, and `poll` asks for a retry later. A
    save that is due earlier is a retry, too. Its failure is reported only if the reason is different.

    Args:
        store: the store on rank 0; None elsewhere.
        keep: see `CheckpointStore.remove_old`.
        event, warn: record an event, and show a warning; called on the training thread.
        touch: called on the training thread while it waits and the write makes progress.
        min_bytes: least bytes that a rank writes.
        on_saved: called on rank 0 with the path of a checkpoint that is on disk; on the training thread.
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
        min_bytes: int = MIN_BYTES,
        on_saved: Callable[[Path], None] = lambda path: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._comm, self._store, self._keep = comm, store, keep
        self._event, self._warn, self._touch = event, warn, touch
        self._min_bytes, self._on_saved, self._clock = min_bytes, on_saved, clock
        self._is_shared = False
        self._snapshot = Snapshot()
        self._thread: threading.Thread | None = None
        self._write: ShardedWrite | None = None
        self._outcome: str | CheckpointError | None = None
        self._abandoned = threading.Event()
        self._progress_count = 0
        self._retry_s, self._retry_at = _FIRST_RETRY_S, float("inf")
        self._last_error = self._why = ""

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Find out which ranks can write, and wait for the last checkpoint at the end. Collective: yes, at the start.

        After an error it waits for no other rank: it abandons a checkpoint of several writers.
        """
        store = self._store
        self._is_shared = is_folder_shared(self._comm, store.directory.parent if store is not None else None)
        if store is not None:
            store.clean()
        try:
            yield
        except BaseException:
            if self._write is not None and self._write.count > 1:
                self._abandoned.set()
            self._join(patience_s=_PATIENCE_S)
            self._abandoned.set()
            if self._write is not None and isinstance(self._outcome, str):
                with suppress(HvdtrainError):
                    self._report_saved(self._write.step, self._outcome)
            raise
        self.wait()

    def save(
        self, step: int, state: StateDict, notes: Mapping[str, Any], *, wait: bool, urgent: bool = False, why: str = ""
    ) -> None:
        """Save a state, the same on every rank; it may change after this returns. Collective: yes.

        With `wait` it returns when the checkpoint is on disk, and makes no copy. `urgent`: little time is left, so it
        removes no old checkpoints. `notes` are values for the manifest; the event that reports the save has `why`.

        Errors: CheckpointError: on every rank: the state contains a dtype that cannot be saved; or, with `wait`, the
        checkpoint could not be written.
        """
        check_dtypes(state)
        self.wait()
        self._why = why
        own = state.pieces_of(self._comm.rank)
        own_bytes = sum(piece.tensor.nbytes for piece in own)
        totals = self._comm.allreduce(torch.tensor([len(own), own_bytes]), name="checkpoint/pieces").wait().tolist()
        pieces, total_bytes = totals[0], totals[1] + state.replicated().nbytes
        count = count_writers(total_bytes, self._comm.size, self._min_bytes) if self._is_shared else 1
        if pieces and count == 1:
            state, pieces = gather_pieces(state, self._comm), 0
        elif pieces:
            count = self._comm.size  # each rank writes its own pieces
        try:
            folder = Path(on_rank_0(self._comm, partial(self._begin, step, count), name="checkpoint/folder"))
        except CheckpointError as error:
            if wait:
                raise
            self._report_failed(step, error)
            return
        if self._comm.rank < count:
            shard = select_shard(state, self._comm.rank, count)
            others = state.replicated().count + pieces - shard.count
            shard = StateDict(shard.tensors, state.values, shard.places)
            if not wait:
                self._snapshot.capture(shard, step)
            own_state = (lambda: shard) if wait else (lambda: self._snapshot.state)
            self._write = ShardedWrite(folder, step, count, own_state, others, notes, None if urgent else self._keep)
            if wait:
                self._run_write(self._touch)
            else:
                self._thread = threading.Thread(target=self._run_write, name="checkpoint", daemon=True)
                self._thread.start()
        if wait:
            try:
                name = on_rank_0(self._comm, self._saved_name, name="saved")
            finally:
                self._reset()
            self._report_saved(step, name)

    def poll(self) -> int:
        """Report the outcome of a finished write. Return 1 if a retry of a failed save is due, otherwise 0.

        Every rank calls it at each step boundary. It takes microseconds.
        """
        if self._thread is not None and not self._thread.is_alive():
            self.wait()
        if self._clock() < self._retry_at:
            return 0
        self._retry_at = float("inf")
        return 1

    def wait(self) -> None:
        """Wait for the current write, if any, and report its outcome."""
        self._join()
        write, outcome = self._write, self._outcome
        self._reset()
        if write is None:
            return
        if isinstance(outcome, CheckpointError):
            self._report_failed(write.step, outcome)
        elif outcome is not None:
            self._report_saved(write.step, outcome)

    def _begin(self, step: int, count: int) -> str:
        assert self._store is not None
        return str(self._store.begin(step, count).resolve())

    def _run_write(self, on_progress: Callable[[], None] = lambda: None) -> None:
        """Write this rank's part, in any thread."""
        write = self._write
        assert write is not None

        def progress() -> None:
            self._progress_count += 1
            on_progress()
            if self._abandoned.is_set():
                raise Abandoned

        with suppress(Abandoned):
            if self._store is None:
                write.write_on_other_rank(self._comm.rank, progress)
                return
            try:
                self._outcome = self._store.write(write, progress, self._abandoned)
            except CheckpointError as error:
                self._outcome = error

    def _saved_name(self) -> str:
        if isinstance(self._outcome, CheckpointError):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome

    def _join(self, patience_s: float = float("inf")) -> None:
        """Wait for the thread, at most `patience_s` seconds."""
        end, count = time.monotonic() + patience_s, -1
        while self._thread is not None and self._thread.is_alive() and time.monotonic() < end:
            self._thread.join(min(0.1, patience_s))
            if self._progress_count != count:
                count = self._progress_count
                self._touch()

    def _reset(self) -> None:
        self._thread = self._write = self._outcome = None

    def _report_saved(self, step: int, name: str) -> None:
        why = "after saves that failed" if self._last_error else self._why
        self._retry_s, self._retry_at, self._last_error = _FIRST_RETRY_S, float("inf"), ""
        self._event({"event": "checkpoint", "at_step": step, "path": name, **({"why": why} if why else {})})
        if self._store is not None:
            self._on_saved(self._store.directory / name)

    def _report_failed(self, step: int, error: CheckpointError) -> None:
        if self._store is None:
            return
        is_new_retry = self._retry_at == float("inf")
        if is_new_retry:
            self._retry_at = self._clock() + self._retry_s
            self._retry_s = min(2 * self._retry_s, _LAST_RETRY_S)
        retry_s = max(0.0, self._retry_at - self._clock())
        with suppress(HvdtrainError):  # a full disk stops the journal, too
            self._event({"event": "checkpoint_failed", "at_step": step, "error": error.what, "retry_s": retry_s})
        before, self._last_error = self._last_error, error.what.replace(str(step), "")
        if not is_new_retry and self._last_error == before:
            return
        try:
            newest = self._store.list()[-1:]
        except UnreadableCheckpointError:
            newest = []
        self._warn(
            f"{error.what} ({error.found}). Next: {error.next_step or 'see the error'}. Training continues;"
            f" {f'the newest checkpoint is of step {newest[0].step}' if newest else 'there is no checkpoint yet'}."
            f" The next save is a retry, in at most {retry_s:.0f} s; until then the same error is not reported again"
        )
