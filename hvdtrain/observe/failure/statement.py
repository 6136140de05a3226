"""What one rank says of itself when a run fails: where it is, what went wrong there, its memory, its stacks."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from hvdtrain.comm.waiting import in_collective
from hvdtrain.observe.encodable import encodable
from hvdtrain.observe.failure import process
from hvdtrain.observe.failure.fault import Fault, bare_fault, fault
from hvdtrain.runtime.clock import steady_s
from hvdtrain.spans import MAIN, Spans

FAILED, STALLED, HERE = "failed", "stalled", "here"
"""Kinds: an error was raised; no progress for too long; asked by another rank's statement."""

TRAINING = "training"
WATCHDOG_THREAD = "hvdtrain watchdog"


@dataclass(frozen=True)
class Who:
    """A rank as a process.

    Attributes:
        rank: 0 to size - 1.
        host: name of its host.
        pid: its number there.
        began: when the process began, see `process.started`.
    """

    rank: int
    host: str
    pid: int
    began: int


@dataclass(frozen=True)
class Statement:
    """What one rank says.

    Attributes:
        kind: FAILED, STALLED or HERE.
        time: seconds since 1970.
        who: the rank.
        step: the optimizer step being done, counted from 1; 0 before the first.
        open: names of the spans that the training thread is in, outermost first, with the seconds since they began.
        last: the span that ended last.
        idle_s: seconds since a span began or ended.
        in_flight: collectives started and not yet waited for, with the seconds since they began.
        waits: whether the training thread waits in a collective.
        memory: in MiB, see `process.memory`.
        fault: of FAILED.
        stacks: of each thread by name, the innermost frame last; the one that trains is called TRAINING.
        held: what holds memory, where that ran out; see `hvdtrain.training.diagnostics.memory_holders`.
    """

    kind: str
    time: float
    who: Who
    step: int = 0
    open: list[tuple[str, float]] = field(default_factory=list)
    last: str = ""
    idle_s: float = 0.0
    in_flight: dict[str, float] = field(default_factory=dict)
    waits: bool = False
    memory: dict[str, float] = field(default_factory=dict)
    fault: Fault | None = None
    stacks: dict[str, list[str]] = field(default_factory=dict)
    held: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)


def from_json(value: Mapping[str, Any]) -> Statement:
    """The statement that `to_json` gave."""
    known = {f.name: value[f.name] for f in fields(Statement) if f.name in value}
    known["who"] = Who(**value["who"])
    known["fault"] = Fault(**value["fault"]) if value.get("fault") else None
    known["open"] = [(name, seconds) for name, seconds in value.get("open", [])]
    return Statement(**known)


@dataclass(frozen=True)
class Witness:
    """What a rank makes its statements from; its thread is the one that trains.

    Attributes:
        who: the rank.
        spans: of the training thread.
        in_flight: of the communicator.
        thread: identity of the training thread.
    """

    who: Who
    spans: Spans
    in_flight: Mapping[str, float]
    thread: int = field(default_factory=threading.get_ident)

    def here(self, kind: str = HERE) -> Statement:
        """Where this rank is now. To be called from another thread than the one that trains."""
        stacks, waits = self._stacks()
        return Statement(
            kind, steady_s(), self.who, **self._place(), waits=waits, memory=process.memory(), stacks=stacks
        )

    def failed(self, error: BaseException, held: dict[str, Any] | None = None) -> Statement:
        """What went wrong. To be called from the training thread: what it was in has been left by then."""
        events = reversed(self.spans.events(self.spans.step))
        last = next((e.name for e in events if e.track == MAIN and e.name not in ("gc", "step")), "")
        return Statement(
            FAILED,
            steady_s(),
            self.who,
            **self._place(),
            last=last,
            memory=process.memory(device=True),
            fault=fault(error),
            held=held or {},
        )

    def barely(self, kind: str, error: BaseException | None = None) -> Statement:
        """The least that can be said, where the rest cannot: an error of strange parts, no memory for a traceback."""
        return Statement(kind, steady_s(), self.who, self.spans.step, fault=bare_fault(error) if error else None)

    def _place(self) -> dict[str, Any]:
        now = time.monotonic()
        return {
            "step": self.spans.step,
            "open": [(name, round(seconds, 3)) for name, seconds in self.spans.open()],
            "idle_s": round(self.spans.idle_s(), 3),
            "in_flight": {name: round(now - began, 3) for name, began in dict(self.in_flight).items()},
        }

    def _stacks(self) -> tuple[dict[str, list[str]], bool]:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks, waits = {}, False
        for ident, frame in sys._current_frames().items():
            name = names.get(ident, f"thread {ident}")
            if name != WATCHDOG_THREAD:
                lines = [encodable(line.rstrip()) for line in traceback.format_stack(frame)]
                stacks[TRAINING if ident == self.thread else name] = lines
            waits = waits or (ident == self.thread and in_collective(frame))
        return stacks, waits


def myself(rank: int, host: str) -> Who:
    """Describe this process."""
    return Who(rank, host, os.getpid(), process.started(os.getpid()) or 0)
