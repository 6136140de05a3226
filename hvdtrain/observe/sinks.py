"""Pass records of a run to its journal, display, watchers and sinks, such as TensorBoard or the user's function."""

from __future__ import annotations

import copy
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from hvdtrain.errors import ConfigError, HvdtrainError
from hvdtrain.observe.journal import Journal
from hvdtrain.observe.output import Progress
from hvdtrain.runtime.clock import steady_s

Record = Mapping[str, Any]

_PLAIN = {str, int, float, bool, type(None)}
_LIMIT = 10_000
_POLL_S = 0.5
_MAX_FAILURES = 3
_PAUSE_S = 60.0
_CLOSE_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_AFTER_FAILURE_S = 2.0


class Sink(Protocol):
    """Receives the records of a run on rank 0.

    One thread of its own creates the sink and calls both methods. An error there is reported once and does not affect
    training. After three errors in a row the sink is paused for a minute, and its records of that minute are dropped.
    """

    def write(self, record: Record) -> None:
        """Receive a line of the journal: a step if it has no ``event``, else the event of that name."""

    def close(self) -> None:
        """Finish within some seconds, because the run has ended."""


@dataclass
class FunctionSink:
    """A sink that calls a function of one record."""

    write: Callable[[Record], Any]

    def close(self) -> None:
        """Do nothing."""


def sink_maker(value: Any) -> Callable[[], Sink]:
    """Return a factory for a sink, from a sink, a class without arguments, or a function; ConfigError for others."""
    if all(callable(getattr(value, name, None)) for name in ("write", "close")):
        return value if isinstance(value, type) else lambda: value
    if callable(value) and not isinstance(value, type):
        return lambda: FunctionSink(value)
    raise ConfigError(
        "a metric sink is of the wrong type",
        expected="a function of one record, or an object with write(record) and close(), or a class of such objects",
        found=value.__name__ if isinstance(value, type) else type(value).__name__,
    )


@dataclass
class Background:
    """Runs a sink in a thread of its own. Passing a record to it takes a microsecond, however slow the sink is."""

    make: Callable[[], Sink]  # creates the sink, in the thread
    name: str
    warn: Callable[[str], None]  # called from the thread when the sink fails or is too slow
    limit: int = _LIMIT  # waiting records at most. Further ones are dropped and counted
    clock: Callable[[], float] = time.monotonic
    _waiting: deque[Record] = field(default_factory=deque)
    _dropped: int = 0
    _failures: int = 0
    _has_failed: bool = False
    _paused_until_s: float = -math.inf
    _ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, name=f"sink {self.name}", daemon=True)
        self._thread.start()

    def put(self, record: Record) -> None:
        """Pass a record to the sink. The caller must not change it later."""
        if len(self._waiting) < self.limit:
            self._waiting.append(record)
        else:
            self._dropped += 1

    def close(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for the sink to receive the waiting records and to close."""
        self._ended.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self.warn(f"the metric sink {self.name} did not finish within {timeout_s:.0f} s; the run ends without it")

    def _run(self) -> None:
        try:
            sink = self.make()
        except Exception as error:
            self.warn(f"the metric sink {self.name} cannot be created: {type(error).__name__}: {error}")
            sink, self._paused_until_s = FunctionSink(lambda record: None), math.inf
        ended = False
        while not ended:
            ended = self._ended.wait(_POLL_S)
            self._drain(sink)
        self._attempt(sink.close)

    def _drain(self, sink: Sink) -> None:
        while self._waiting:
            # A copy, because the sink may change it. Copying a record of plain values as a whole would take 11 us.
            items = self._waiting.popleft().items()
            record = {key: value if type(value) in _PLAIN else copy.deepcopy(value) for key, value in items}
            if self.clock() >= self._paused_until_s:
                self._attempt(partial(sink.write, record))
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            self.warn(f"the metric sink {self.name} is too slow: {dropped} records were dropped")

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
            self._failures = 0
        except Exception as error:
            self._failures += 1
            if not self._has_failed:
                self._has_failed = True
                self.warn(f"the metric sink {self.name} failed: {type(error).__name__}: {error}")
            if self._failures == _MAX_FAILURES:
                self.warn(
                    f"the metric sink {self.name} failed {_MAX_FAILURES} times in a row: it gets no records for"
                    f" {_PAUSE_S:.0f} s"
                )
            if self._failures >= _MAX_FAILURES:
                self._paused_until_s = self.clock() + _PAUSE_S


class Watcher(Protocol):
    """Observes the steps of one rank, such as a trace or a profiler. It must handle its own errors."""

    def begin_step(self, step: int) -> None:
        """Handle the beginning of step `step`, counted from 1."""

    def close(self) -> None:
        """Handle the end of the run, whatever its reason."""


class Recorder:
    """Journal, display, sinks and watchers of one rank. Other ranks than 0 have no journal, and a quiet display."""

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
            if self._journal is not None:
                closing.callback(self._journal.close)
            closing.callback(setattr, self, "_journal", None)  # a sink thread that is still running may still warn
            closing.callback(self._display.close)
            closing.callback(self._close_sinks)
            closing.callback(self.close_watchers)

    def _close_sinks(self) -> None:
        deadline = time.monotonic() + self._close_timeout_s
        for sink in self._sinks:
            sink.close(max(0.0, deadline - time.monotonic()))

    def _record(self, record: dict[str, Any]) -> None:
        if self._journal is not None:
            self._journal.write(record)
        for sink in self._sinks:
            sink.put(record)
