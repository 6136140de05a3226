"""Pass records of a run to the journal, the display, the sinks and the watchers."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, Protocol

from hvdtrain.errors import HvdtrainError
from hvdtrain.observe.journal import Journal
from hvdtrain.observe.progress import Progress
from hvdtrain.observe.sinks import Background, Sink
from hvdtrain.runtime.clock import steady_s

_CLOSE_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_AFTER_FAILURE_S = 2.0


class Watcher(Protocol):
    """Observes the steps of one rank, such as a trace or a profiler. It must handle its own errors."""

    def begin_step(self, step: int) -> None:
        """Handle the beginning of step `step`, counted from 1."""

    def close(self) -> None:
        """Handle the end of the run, whatever its reason."""


class Recorder:
    """Journal, display, sinks and watchers of one rank.

    Args:
        journal: None on ranks other than 0.
        display: quiet on ranks other than 0.
    """

    def __init__(self, journal: Journal | None, display: Progress) -> None:
        self._journal = journal
        self.is_rank_0 = journal is not None
        self._display = display
        self._sinks: list[Background] = []
        self._watchers: list[Watcher] = []
        self._watched = -1
        self._close_timeout_s = _CLOSE_TIMEOUT_S

    def add_sink(self, make: Callable[[], Sink], name: str) -> None:
        """Send later records to the sink that `make` creates, in a thread of its own."""
        self._sinks.append(Background(make, name, self.warn))

    def add_watcher(self, watcher: Watcher) -> None:
        """Notify `watcher` of later steps."""
        self._watchers.append(watcher)

    def begin(self, total: int) -> None:
        """Prepare for steps up to step `total`."""
        self._watched = -1
        self._display.begin(total)

    def begin_step(self, step: int) -> None:
        """Notify the watchers that step `step` begins, unless it is repeated after a rollback."""
        if step <= self._watched:
            return
        self._watched = step
        for watcher in self._watchers:
            watcher.begin_step(step)

    def step(self, record: dict[str, Any]) -> None:
        """Record and show a step."""
        self._record(record)
        self._display.step(record)

    def event(self, record: dict[str, Any]) -> None:
        """Record an event with its time. A requested checkpoint is shown too. Any thread may call it."""
        if record["event"] == "failed":
            self._close_timeout_s = _CLOSE_TIMEOUT_AFTER_FAILURE_S
        self._record({**record, "time": steady_s()})
        if record["event"] == "checkpoint" and "why" in record:
            self.say(f"checkpoint of step {record['at_step']} saved, {record['why']}: checkpoints/{record['path']}")

    def show(self, record: dict[str, Any]) -> None:
        """Send an event to the sinks only, because it is too large for the journal."""
        for sink in self._sinks:
            sink.put({**record, "time": steady_s()})

    def say(self, text: str) -> None:
        """Show a line."""
        self._display.say(text)

    def warn(self, text: str) -> None:
        """Record and show a warning. Any thread may call it; it raises nothing."""
        with suppress(HvdtrainError):  # on a full disk it can only be shown
            self.event({"event": "warning", "text": text})
        self._display.say(f"warning: {text}")

    def close_watchers(self) -> None:
        """Close the watchers first, because other code reads their files after the last step."""
        watchers, self._watchers = self._watchers, []
        with ExitStack() as closing:
            for watcher in reversed(watchers):
                closing.callback(watcher.close)

    def close(self) -> None:
        """Close the watchers, sinks, display and journal in this order, each also if another one fails."""
        with ExitStack() as closing:
            closing.callback(self._close_journal)
            closing.callback(self._display.close)
            closing.callback(self._close_sinks)
            closing.callback(self.close_watchers)

    def _close_journal(self) -> None:
        journal, self._journal = self._journal, None  # a sink thread that is still running may still warn
        if journal is not None:
            journal.close()

    def _close_sinks(self) -> None:
        deadline = time.monotonic() + self._close_timeout_s
        for sink in self._sinks:
            sink.close(max(0.0, deadline - time.monotonic()))

    def _record(self, record: dict[str, Any]) -> None:
        if self._journal is not None:
            self._journal.write(record)
        for sink in self._sinks:
            sink.put(record)
