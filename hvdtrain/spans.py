"""Where the time of a step goes: a recorder of timed spans, a leaf that every module may use."""

from __future__ import annotations

import time
from collections.abc import Callable


class Spans:
    """Seconds spent under each name since they were last taken. Not nested, not for several threads."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}

    def __call__(self, name: str) -> _Span:
        """A context manager whose duration is added to `name`."""
        return _Span(self, name)

    def add(self, name: str, seconds: float) -> None:
        """Add a duration that was measured elsewhere."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def now(self) -> float:
        """The recorder's clock, in seconds."""
        return self._clock()

    def take(self) -> dict[str, float]:
        """Seconds by name; starts anew."""
        taken, self._seconds = self._seconds, {}
        return taken


class _Span:
    __slots__ = ("_name", "_recorder", "_start")

    def __init__(self, recorder: Spans, name: str) -> None:
        self._recorder = recorder
        self._name = name
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = self._recorder.now()

    def __exit__(self, *exception: object) -> None:
        self._recorder.add(self._name, self._recorder.now() - self._start)
