"""A rank's statement when a run fails: where it is, its error, its memory, its stacks; and texts that name ranks."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from hvdtrain.comm.rounds import in_collective
from hvdtrain.errors import listed
from hvdtrain.observe.failure import process_states
from hvdtrain.observe.failure.fault import Fault, bare_fault, fault
from hvdtrain.observe.output import encodable
from hvdtrain.runtime.clock import steady_s
from hvdtrain.runtime.host import cpu_ranges
from hvdtrain.spans import MAIN, Spans

FAILED, STALLED, CURRENT = "failed", "stalled", "here"
"""Kinds: an error was raised; no progress for too long; where a rank is when another one has made a statement."""

TRAINING = "training"
WATCHDOG_THREAD = "hvdtrain watchdog"

JSON_NAMES = {"process": "who", "open_spans": "open", "last_span": "last", "is_waiting": "waits",
              "memory_holders": "held"}  # fmt: skip
"""Keys of `failure.json` (format 1) that differ from names of attributes."""


class RankProcess(Struct, frozen=True):
    """A rank and its process: the process ID on its host, and when it began, see `process_states.started`."""

    rank: int
    host: str
    pid: int
    began: int


class Statement(Struct, frozen=True, rename=JSON_NAMES):
    """The state of one rank."""

    kind: str  # FAILED, STALLED or CURRENT
    time: float  # seconds since 1970
    process: RankProcess
    step: int = 0  # the current optimizer step, counted from 1; 0 before the first
    open_spans: list[tuple[str, float]] = []  # of the training thread, outermost first, with seconds since each began
    last_span: str = ""
    idle_s: float = 0.0  # seconds since a span began or ended
    in_flight: dict[str, float] = {}  # collectives that were started and not waited for, with seconds since then
    is_waiting: bool = False  # whether the training thread waits in a collective
    memory: dict[str, float] = {}  # in MiB, see `process_states.memory`
    fault: Fault | None = None  # the error, if the kind is FAILED
    stacks: dict[str, list[str]] = {}  # by name of thread, innermost frame last. The training thread is called TRAINING
    memory_holders: dict[str, Any] = {}  # if memory ran out; see `training.diagnostics.failure_report`


@dataclass(frozen=True)
class StatementMaker:
    """Makes the statements of one rank. Constructed in the training thread, with its spans and collectives."""

    process: RankProcess
    spans: Spans
    in_flight: Mapping[str, float]
    thread: int = field(default_factory=threading.get_ident)

    def current(self, kind: str = CURRENT) -> Statement:
        """Say where this rank is now. Called from a thread other than the training thread."""
        stacks, is_waiting = self._stacks()
        return self._statement(kind, is_waiting=is_waiting, memory=process_states.memory(), stacks=stacks)

    def failure(self, error: BaseException) -> Statement:
        """Describe an error. Called from the training thread, which has left its spans by then."""
        events = reversed(self.spans.events(self.spans.step))
        last = next((e.name for e in events if e.track == MAIN and e.name not in ("gc", "step")), "")
        return self._statement(FAILED, last_span=last, memory=process_states.memory(device=True), fault=fault(error))

    def minimal(self, kind: str, error: BaseException | None = None) -> Statement:
        """Say the minimum, where the rest fails: an error with broken methods, no memory for a traceback."""
        return Statement(kind, steady_s(), self.process, self.spans.step, fault=bare_fault(error) if error else None)

    def _statement(self, kind: str, **facts: Any) -> Statement:
        """Say where the training thread is, with further `facts`."""
        now = time.monotonic()
        return Statement(
            kind,
            steady_s(),
            self.process,
            self.spans.step,
            open_spans=[(name, round(seconds, 3)) for name, seconds in self.spans.open()],
            idle_s=round(self.spans.idle_s(), 3),
            in_flight={name: round(now - began, 3) for name, began in dict(self.in_flight).items()},
            **facts,
        )

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


def place(statement: Statement) -> str:
    """Return where a rank is: ``in wait at step 12 for 3.1 s, waiting for gradients/0``."""
    at = f"at step {statement.step}" if statement.step else "before the first step"
    if statement.open_spans:
        name, seconds = statement.open_spans[-1]
        text = f"in {name} {at} for {seconds:.1f} s"
    else:
        text = at + (f", last in {statement.last_span}" if statement.last_span else "")
        text += f" for {statement.idle_s:.1f} s" if statement.is_waiting or statement.kind == STALLED else ""
    if statement.in_flight and statement.fault is None:
        text += f", {'waiting for' if statement.is_waiting else 'with'} {listed(statement.in_flight)}"
    return text


def grouped(statements: Iterable[Statement]) -> list[tuple[str, Statement]]:
    """Group ranks that are at the same place: the label of each group, and its longest idle statement."""
    groups: dict[tuple[Any, ...], list[Statement]] = {}
    for s in statements:
        error = s.fault.type if s.fault else ""
        inside = s.open_spans[-1][0] if s.open_spans else ""
        groups.setdefault((s.step, inside, tuple(s.in_flight), s.is_waiting, error), []).append(s)
    return [(labels(s.process for s in group), max(group, key=lambda s: s.idle_s)) for group in groups.values()]


def label(process: RankProcess) -> str:
    """Return ``rank 3 on host``."""
    return f"rank {process.rank} on {process.host}"


def labels(processes: Iterable[RankProcess]) -> str:
    """Return ``rank 3 on host`` for one rank, ``ranks 1-3, 5`` for several."""
    members = sorted(processes, key=lambda process: process.rank)
    if len(members) == 1:
        return label(members[0])
    hosts = {process.host for process in members}
    return f"ranks {ranges([process.rank for process in members])}" + (f" on {hosts.pop()}" if len(hosts) == 1 else "")


def ranges(numbers: Sequence[int]) -> str:
    """Return ``1-3, 5`` for 1, 2, 3, 5."""
    return cpu_ranges(numbers).replace(",", ", ")


def agree(ranks: Sequence[object], singular: str, plural: str) -> str:
    """Return the word that agrees with the number of ranks."""
    return singular if len(ranks) == 1 else plural
