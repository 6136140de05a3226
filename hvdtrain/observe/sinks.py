"""Where a run's records go beside the journal: TensorBoard, a web tracker, any function or class of the user's."""

from __future__ import annotations

import copy
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from hvdtrain.errors import ConfigError

Record = Mapping[str, Any]

_LIMIT = 10_000
_POLL_S = 0.5
_FAILURES = 3
_REST_S = 60.0


class Sink(Protocol):
    """Takes what happens in a run, on rank 0.

    It is made and both methods are called in one thread that belongs to the sink alone. What is raised there is said
    once, and costs the training nothing. A sink that fails a few times in a row is left alone for a minute, and gets
    what comes after that.
    """

    def write(self, record: Record) -> None:
        """Take a line of the journal: a step where it has no ``event``, else an event of that name."""
        ...

    def close(self) -> None:
        """The run has ended; there are some seconds to finish."""
        ...


class FunctionSink:
    """A function of one record as a sink."""

    def __init__(self, function: Callable[[Record], object]) -> None:
        self._function = function

    def write(self, record: Record) -> None:
        """Call the function."""
        self._function(record)

    def close(self) -> None:
        """Do nothing."""


def sink_maker(value: Any) -> Callable[[], Sink]:
    """How to make a sink of a sink, of a class of sinks that needs no arguments, or of a function of one record.

    Errors:
        ConfigError: it is none of them.
    """
    if all(callable(getattr(value, name, None)) for name in ("write", "close")):
        return value if isinstance(value, type) else lambda: value
    if callable(value) and not isinstance(value, type):
        return lambda: FunctionSink(value)
    raise ConfigError(
        "a metric sink is of the wrong type",
        expected="a function of one record, or an object with write(record) and close(), or a class of such objects",
        found=value.__name__ if isinstance(value, type) else type(value).__name__,
    )


class Background:
    """Feeds a sink from a thread of its own; handing it a record takes a microsecond, however slow the sink is.

    Args:
        make: makes the sink, in the thread.
        name: for messages.
        warn: told when the sink fails or falls behind; called from the thread.
        limit: records that wait at most; those that come while so many wait are dropped, and counted.
        clock: seconds.
    """

    def __init__(
        self,
        make: Callable[[], Sink],
        name: str,
        warn: Callable[[str], None],
        limit: int = _LIMIT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make = make
        self._name = name
        self._warn = warn
        self._limit = limit
        self._waiting: deque[Record] = deque()
        self._dropped = 0
        self._failures = 0
        self._has_failed = False
        self._clock = clock
        self._rests_until = -math.inf
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"sink {name}", daemon=True)
        self._thread.start()

    def put(self, record: Record) -> None:
        """Hand over a record, which nobody changes any more."""
        if len(self._waiting) < self._limit:
            self._waiting.append(record)
        else:
            self._dropped += 1

    def close(self, patience_s: float) -> None:
        """Let the sink take what waits, for at most so long; a sink that needs longer is left behind."""
        self._ended.set()
        self._thread.join(patience_s)
        if self._thread.is_alive():
            self._warn(f"the metric sink {self._name} did not end within {patience_s:.0f} s and is left behind")

    def _run(self) -> None:
        try:
            sink = self._make()
        except Exception as error:
            self._warn(f"the metric sink {self._name} cannot be made: {type(error).__name__}: {error}")
            sink, self._rests_until = FunctionSink(lambda record: None), math.inf
        ended = False
        while not ended:
            ended = self._ended.wait(_POLL_S)
            self._drain(sink)
        self._attempt(sink.close)

    def _drain(self, sink: Sink) -> None:
        while self._waiting:
            # A copy: what the sink does to it is nobody else's affair.
            record = copy.deepcopy(self._waiting.popleft())
            if self._clock() >= self._rests_until:
                self._attempt(partial(sink.write, record))
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            self._warn(f"the metric sink {self._name} is too slow: {dropped} records were dropped")

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
            self._failures = 0
        except Exception as error:
            self._failures += 1
            if not self._has_failed:
                self._has_failed = True
                self._warn(f"the metric sink {self._name} failed: {type(error).__name__}: {error}")
            if self._failures == _FAILURES:
                self._warn(
                    f"the metric sink {self._name} failed {_FAILURES} times in a row: it is left alone for"
                    f" {_REST_S:.0f} s, then tried again"
                )
            if self._failures >= _FAILURES:
                self._rests_until = self._clock() + _REST_S
