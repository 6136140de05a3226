"""Copy checkpoints and the journal of a run to a store while training continues. No step waits for the store."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvdtrain.errors import CheckpointError, HvdtrainError, StoreError, UnwrittenCheckpointError
from hvdtrain.run_layout import RunLayout
from hvdtrain.state.checkpoint_store import saved_at
from hvdtrain.state.stored_run import StoredRun

_RETRY_S = (1.0, 60.0)  # delay after the first failed try, and the limit up to which it doubles

LAST_S = 240.0  # how long the end of a run waits for the copy of the last checkpoint
STOPPED_S = 30.0  # the same if a signal stops the run: launchers do not wait long

_CLOSE_S = 2.0
_TICK_S = 0.05


class StoreCopier:
    """Copies the newest checkpoint, in a thread of rank 0. One that a newer one replaces meanwhile is left out.

    A copy that fails is tried again until it succeeds. `report` is called on the training thread at each step, and
    records what the thread has done.

    Args:
        keep: number of newest checkpoints to keep on the store; the best one is kept, too.
        event, warn: record an event, and show a warning.
    """

    def __init__(
        self,
        stored: StoredRun,
        layout: RunLayout,
        keep: int,
        event: Callable[[dict[str, Any]], None],
        warn: Callable[[str], None],
    ) -> None:
        self._stored, self._layout, self._keep = stored, layout, keep
        self._event, self._warn = event, warn
        self._changed = threading.Condition()
        self._wanted: Path | None = None  # the newest checkpoint, until it is copied
        self._copying: Path | None = None
        self._resumed: tuple[int, int] | None = None  # set aside what the store has after it, first
        self._copied_step = 0  # step of the newest copy of this start
        self._tries = 0  # that failed in a row
        self._is_closed = False
        self._done: deque[dict[str, Any]] = deque()  # events that are not yet recorded
        self._last_error = ""
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)

    def begin(self, resumed: Path | None) -> None:
        """Start, after the run has resumed from a checkpoint of its own, or from none."""
        saved = saved_at(resumed) if resumed is not None else None
        self._resumed = (0, 0) if saved is None else (saved.step, saved.again)
        self._wanted = resumed
        self._thread.start()

    def copy(self, path: Path) -> None:
        """Copy the checkpoint in this folder, which is the newest one."""
        with self._changed:
            self._wanted = path
            self._changed.notify()
        if self._last_error:
            self._report_behind()

    def needs(self, path: Path) -> bool:
        """Return whether a checkpoint must not be removed, because it is being copied."""
        return path in (self._copying, self._wanted)

    def report(self) -> None:
        """Record what has happened since the last call, and warn about a new error."""
        while self._done:
            event = self._done.popleft()
            with suppress(HvdtrainError):  # a full disk stops the journal
                self._event(event)
            if event["event"] == "copied":
                if self._last_error:
                    self._warn(f"{self._stored.url} has step {event['at_step']}: it is up to date again")
                self._last_error = ""
            elif event["event"] == "set_aside":
                self._warn(f"{event['path']} is set aside: its manifest has another name now, and is not used")
            elif event["error"] != self._last_error:
                self._last_error = event["error"]
                self._report_behind()

    def finish(self, patience_s: float, touch: Callable[[], None]) -> None:
        """Wait until the newest checkpoint is copied, and then the journal once more.

        Errors: UnwrittenCheckpointError: it could not be copied in `patience_s` seconds.
        """
        end = time.monotonic() + patience_s
        while (wanted := self._wanted) is not None and time.monotonic() < end and self._thread.is_alive():
            touch()
            self.report()
            time.sleep(_TICK_S)
        self.report()
        if wanted is not None:
            raise UnwrittenCheckpointError(
                f"{self._stored.url} has no copy of {wanted.name}",
                expected=f"a copy within {patience_s:.0f} s",
                found=self._last_error or "the copy is not finished",
                next_step=f"keep {wanted}; when the store answers, the same command copies it",
            )
        with suppress(StoreError, OSError):
            self._stored.upload_records(self._layout)

    def close(self) -> None:
        """Stop after the current try, and wait a short time for it."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)
        self.report()

    def _report_behind(self) -> None:
        wanted, copied = self._wanted, self._copied_step
        if wanted is None:
            return
        newest = _step(wanted)
        behind = f"is {newest - copied} steps behind, at step {copied}" if copied else "has no copy of this start"
        self._warn(
            f"{self._stored.url} {behind}: {self._last_error}. Training continues; step {newest} is saved on this"
            f" machine. Another try follows, at the latest after {_RETRY_S[1]:.0f} s"
        )

    def _run(self) -> None:
        while True:
            with self._changed:
                idle = self._wanted is None and self._resumed is None
                delay = min(_RETRY_S[1], _RETRY_S[0] * 2.0 ** (self._tries - 1)) if self._tries else 0.0
                if not self._is_closed and (idle or delay):
                    self._changed.wait(None if idle else delay)
                if self._is_closed:
                    return
                self._copying = self._wanted
            try:
                self._work()
                self._tries = 0
            except Exception as error:  # a thread would lose it
                self._tries += 1
                found = f"{type(error).__name__}: {error}"
                if isinstance(error, StoreError | CheckpointError):
                    found = f"{error.what} ({error.found})"
                about = {"at_step": _step(self._copying), "error": found, "to": self._stored.url}
                self._done.append({"event": "copy_failed", **about})
            finally:
                self._copying = None

    def _work(self) -> None:
        path, url, began = self._copying, self._stored.url, time.monotonic()
        is_there = path is not None and self._stored.has_same(path)
        if self._resumed is not None:
            for name in self._stored.set_aside_after(self._resumed):
                self._done.append({"event": "set_aside", "path": f"{url}/checkpoints/{name}"})
            self._resumed = None
            if is_there and path is not None:
                self._end(path)
                return
        if path is None:
            return
        self._stored.upload_records(self._layout)  # first: a complete checkpoint has the journal of its steps
        size_bytes = 0 if is_there else self._stored.upload(path, self._check_open)
        self._copied_step = _step(path)
        self._stored.remove_old(self._keep, path.name)
        seconds = time.monotonic() - began
        facts = {"at_step": _step(path), "path": path.name, "to": url, "bytes": size_bytes, "seconds": seconds}
        self._done.append({"event": "copied", **facts})
        self._end(path)

    def _end(self, path: Path) -> None:
        with self._changed:
            self._copied_step = _step(path)
            if self._wanted == path:
                self._wanted = None

    def _check_open(self) -> None:
        """End a copy that nobody waits for."""
        if self._is_closed:
            raise UnwrittenCheckpointError("the run has ended")


def _step(path: Path | None) -> int:
    saved = saved_at(path) if path is not None else None
    return 0 if saved is None else saved.step
