"""Hands what happens in a run to those who record and show it."""

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

_PATIENCE_S = 10.0
_PATIENCE_WHEN_FAILED_S = 2.0


class Watcher(Protocol):
    """Looks at the steps of one rank from outside: a trace, a profiler. Its own failures are its own affair."""

    def begin_step(self, step: int) -> None:
        """Step `step`, counted from 1, is about to be done."""
        ...

    def close(self) -> None:
        """No step comes any more, whatever the reason."""
        ...


class Recorder:
    """The journal, the display, the sinks and the watchers of one rank as one observer.

    Args:
        journal: None on ranks other than 0.
        display: quiet on ranks other than 0.
    """

    def __init__(self, journal: Journal | None, display: Progress) -> None:
        self._journal = journal
        self._is_rank_0 = journal is not None
        self._display = display
        self._sinks: list[Background] = []
        self._watchers: list[Watcher] = []
        self._watched = -1
        self._patience_s = _PATIENCE_S

    @property
    def is_rank_0(self) -> bool:
        """Whether this is the recorder of rank 0."""
        return self._is_rank_0

    def add_sink(self, make: Callable[[], Sink], name: str) -> None:
        """Give the sink that `make` makes every record from now on, in a thread of its own."""
        self._sinks.append(Background(make, name, self.warn))

    def add_watcher(self, watcher: Watcher) -> None:
        """Tell `watcher` of every step from now on."""
        self._watchers.append(watcher)

    def begin(self, total: int) -> None:
        """Steps are about to come, up to step `total`."""
        self._watched = -1
        self._display.begin(total)

    def begin_step(self, step: int) -> None:
        """Step `step` is about to be done; those that are done again after a roll back are not watched again."""
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
        """Record an event, with its time. May be called from any thread.

        A checkpoint that somebody waits for is shown too.
        """
        if record["event"] == "failed":
            self._patience_s = _PATIENCE_WHEN_FAILED_S
        self._record({**record, "time": steady_s()})
        if record["event"] == "checkpoint" and "why" in record:
            self.say(f"checkpoint of step {record['at_step']} saved, {record['why']}: checkpoints/{record['path']}")

    def show(self, record: dict[str, Any]) -> None:
        """Give an event to the sinks alone: what is too large for the journal."""
        for sink in self._sinks:
            sink.put({**record, "time": steady_s()})

    def say(self, text: str) -> None:
        """Show a line."""
        self._display.say(text)

    def warn(self, text: str) -> None:
        """Record and show something that a person should know. May be called from any thread; raises nothing."""
        with suppress(HvdtrainError):  # where the disk is full, showing it is what is left
            self.event({"event": "warning", "text": text})
        self._display.say(f"warning: {text}")

    def close_watchers(self) -> None:
        """End the watchers before the rest: no step comes any more, and what they write is to be read."""
        watchers, self._watchers = self._watchers, []
        with ExitStack() as last_first:
            for watcher in reversed(watchers):
                last_first.callback(watcher.close)

    def close(self) -> None:
        """End the watchers, the sinks, the display and the journal, in this order; each, whatever the others do."""
        with ExitStack() as last_first:
            last_first.callback(self._close_journal)
            last_first.callback(self._display.close)
            last_first.callback(self._close_sinks)
            last_first.callback(self.close_watchers)

    def _close_journal(self) -> None:
        journal, self._journal = self._journal, None  # a sink that is left behind may still warn
        if journal is not None:
            journal.close()

    def _close_sinks(self) -> None:
        deadline = time.monotonic() + self._patience_s
        for sink in self._sinks:
            sink.close(max(0.0, deadline - time.monotonic()))

    def _record(self, record: dict[str, Any]) -> None:
        if self._journal is not None:
            self._journal.write(record)
        for sink in self._sinks:
            sink.put(record)
