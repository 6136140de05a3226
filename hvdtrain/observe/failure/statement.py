"""A rank's statement when a run fails: where it is, its error, its memory, its stacks."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from hvdtrain.comm.waiting import in_collective
from hvdtrain.observe.encodable import encodable
from hvdtrain.observe.failure import process_states
from hvdtrain.observe.failure.fault import Fault, bare_fault, fault
from hvdtrain.runtime.clock import steady_s
from hvdtrain.spans import MAIN, Spans

FAILED, STALLED, CURRENT = "failed", "stalled", "here"
"""Kinds: an error was raised; no progress for too long; where a rank is when another one has made a statement."""

TRAINING = "training"
WATCHDOG_THREAD = "hvdtrain watchdog"

JSON_NAMES = {
    "process": "who",
    "open_spans": "open",
    "last_span": "last",
    "is_waiting": "waits",
    "memory_holders": "held",
}
"""Keys of `failure.json` (format 1) that differ from names of attributes."""


class RankProcess(Struct, frozen=True):
    """A rank and its process.

    Attributes:
        rank: 0 to size - 1.
        host: name of its host.
        pid: process ID on that host.
        began: when the process began, see `process_states.started`.
    """

    rank: int
    host: str
    pid: int
    began: int


class Statement(Struct, frozen=True, rename=JSON_NAMES):
    """The state of one rank.

    Attributes:
        kind: FAILED, STALLED or CURRENT.
        time: seconds since 1970.
        process: the rank.
        step: the current optimizer step, counted from 1; 0 before the first.
        open_spans: spans that the training thread is in, outermost first: name, and seconds since it began.
        last_span: the span that ended last.
        idle_s: seconds since a span began or ended.
        in_flight: collectives that were started and not yet waited for, with the seconds since they began.
        is_waiting: whether the training thread waits in a collective.
        memory: in MiB, see `process_states.memory`.
        fault: the error, if the kind is FAILED.
        stacks: by name of thread, innermost frame last. The training thread is called TRAINING.
        memory_holders: what holds memory, if it ran out; see `hvdtrain.training.diagnostics.memory_holders`.
    """

    kind: str
    time: float
    process: RankProcess
    step: int = 0
    open_spans: list[tuple[str, float]] = []
    last_span: str = ""
    idle_s: float = 0.0
    in_flight: dict[str, float] = {}
    is_waiting: bool = False
    memory: dict[str, float] = {}
    fault: Fault | None = None
    stacks: dict[str, list[str]] = {}
    memory_holders: dict[str, Any] = {}


@dataclass(frozen=True)
class StatementMaker:
    """Makes the statements of one rank. Constructed in the training thread.

    Attributes:
        process: the rank.
        spans: of the training thread.
        in_flight: of the communicator.
        thread: identity of the training thread.
    """

    process: RankProcess
    spans: Spans
    in_flight: Mapping[str, float]
    thread: int = field(default_factory=threading.get_ident)

    def current(self, kind: str = CURRENT) -> Statement:
        """Say where this rank is now. Called from a thread other than the training thread."""
        stacks, is_waiting = self._stacks()
        return Statement(
            kind,
            steady_s(),
            self.process,
            **self._position(),
            is_waiting=is_waiting,
            memory=process_states.memory(),
            stacks=stacks,
        )

    def failure(self, error: BaseException) -> Statement:
        """Describe an error. Called from the training thread, which has left its spans by then."""
        events = reversed(self.spans.events(self.spans.step))
        last = next((e.name for e in events if e.track == MAIN and e.name not in ("gc", "step")), "")
        return Statement(
            FAILED,
            steady_s(),
            self.process,
            **self._position(),
            last_span=last,
            memory=process_states.memory(device=True),
            fault=fault(error),
        )

    def minimal(self, kind: str, error: BaseException | None = None) -> Statement:
        """Say the minimum, where the rest fails: an error with broken methods, no memory for a traceback."""
        return Statement(kind, steady_s(), self.process, self.spans.step, fault=bare_fault(error) if error else None)

    def _position(self) -> dict[str, Any]:
        now = time.monotonic()
        return {
            "step": self.spans.step,
            "open_spans": [(name, round(seconds, 3)) for name, seconds in self.spans.open()],
            "idle_s": round(self.spans.idle_s(), 3),
            "in_flight": {name: round(now - began, 3) for name, began in dict(self.in_flight).items()},
        }

    def _stacks(self) -> tuple[dict[str, list[str]], bool]:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks, is_waiting = {}, False
        for ident, frame in sys._current_frames().items():
            name = names.get(ident, f"thread {ident}")
            if name != WATCHDOG_THREAD:
                lines = [encodable(line.rstrip()) for line in traceback.format_stack(frame)]
                stacks[TRAINING if ident == self.thread else encodable(name)] = lines
            is_waiting = is_waiting or (ident == self.thread and in_collective(frame))
        return stacks, is_waiting


def this_process(rank: int, host: str) -> RankProcess:
    """Describe this process."""
    return RankProcess(rank, host, os.getpid(), process_states.started(os.getpid()) or 0)
