"""Replay one step of a rank: its training thread, and the thread that exchanges gradients next to it. Pure.

The order is that of `exchange.bucket_exchange`. A gradient is packed when backward has finished it. A bucket starts
when it is full. An exchange of several collectives continues when the next gradient arrives, and after backward until
all exchanges have finished. Collectives run one after another, in the order in which they started. All times are in
seconds.

Where ranks divide the parameters, work needs gathered parameters (`engine.gathers`): gathers start in their order, some
of them before they are needed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Collective:
    """One collective."""

    before_s: float  # work of the training thread to make the payload
    wire_s: float  # from its start to its end if no other collective is ahead of it
    cpu_s: float = 0.0  # processor time that it takes from computing, if both share a core; at most `wire_s`
    during_s: float = 0.0  # work of the training thread right after the start


@dataclass(frozen=True)
class Exchange:
    """The exchange of a bucket: a collective starts when the previous one has finished and its own payload is made."""

    collectives: Sequence[Collective]
    after_s: float = 0.0  # work of the training thread to decode the last result
    nbytes: float = 0.0  # memory of the exchange while it runs, for the limit of a step
    kept_bytes: float = 0.0  # memory of the sums that remain after it


@dataclass(frozen=True)
class Arrival:
    """A gradient: computing since the previous one or since backward began, and the time to pack it into its bucket.

    `needs`: how many more of the pass's gathers must be complete before this computing begins.
    """

    gap_s: float
    pack_s: float
    bucket: int
    needs: int = 0


@dataclass(frozen=True)
class Part:
    """A part of a forward pass: the gathers that it needs in addition to those of earlier parts, and its work."""

    needs: int
    work_s: float


@dataclass(frozen=True)
class Step:
    """A step of a rank, or one of its passes.

    Attributes:
        late_s: time to pack the gradients that backward skips, by bucket; those buckets start after backward.
        ahead_bytes: gathers start in advance while no more than these bytes are gathered at the same time; None if a
            gather starts only when it is needed.
        limit_bytes: of the memory of running exchanges and of the sums that remain: packing waits for older ones.
        earlier: passes before this one that exchange or gather, too. Their sums are complete before the next backward.
        repeats: backward passes before this one that exchange nothing: each takes this one's computing.
    """

    before_s: float  # until `forward` begins, or the last backward pass if that is empty
    arrivals: Sequence[Arrival]  # gradients in the order in which backward finishes them
    tail_s: float  # backward after the last gradient
    exchanges: Sequence[Exchange]
    late_s: Sequence[float] = ()
    after_s: float = 0.0  # from the last sum to the end of the step: clipping, optimizer, everything else
    forward: Sequence[Part] = ()  # the forward pass, where it needs gathered parameters
    gathers: Sequence[Exchange] = ()  # of the pass, in the order of their need
    ahead_bytes: float | None = None
    limit_bytes: float = math.inf
    earlier: Sequence[Step] = ()
    repeats: int = 0

    @property
    def computing_s(self) -> float:
        """Seconds of a backward pass without packing."""
        return math.fsum(arrival.gap_s for arrival in self.arrivals) + self.tail_s


@dataclass(frozen=True)
class Replayed:
    """The durations of a replayed step."""

    step_s: float
    compute_s: float  # the training thread's own work
    backward_s: float  # the mean of backward passes, with packing and coding during them
    wait_s: float  # from the end of backward to the last sum
    wire_s: float  # the exchanging thread's work
    gather_s: float = 0.0  # waiting for gathered parameters, and copying them


def replay(step: Step) -> Replayed:
    """Return the durations of a step."""
    return _Replay().run(step)


@dataclass(eq=False)
class _Running:
    """A collective that has started, and the seconds that it still needs."""

    left_s: float
    cpu_share: float
    finished: bool = False


class _Replay:
    def __init__(self) -> None:
        self._now = 0.0
        self._worked = 0.0
        self._wire_s = 0.0
        self._gather_s = 0.0
        self._queue: deque[_Running] = deque()
        """Collectives that have not finished; the first one is in progress."""
        self._gathers: deque[Exchange] = deque()
        """Gathers of the pass that have not started."""
        self._gathering: deque[tuple[Exchange, _Running]] = deque()
        self._ahead_bytes: float | None = None

    def run(self, step: Step) -> Replayed:
        backward_s = 0.0
        passes = [*step.earlier, step]
        for number, one in enumerate(passes):
            self._begin_forward(one)
            began = self._now
            if number:
                self._finish()
            self._backward(one)
            backward_s += self._now - began + one.repeats * one.computing_s
        backward_end = self._now
        self._finish()
        wait_s = self._now - backward_end
        self._work(step.after_s)
        mean_s = backward_s / (len(passes) + sum(one.repeats for one in passes))
        return Replayed(self._now, self._worked, mean_s, wait_s, self._wire_s, self._gather_s)

    def _begin_forward(self, one: Step) -> None:
        self._ahead_bytes = one.ahead_bytes
        self._gathers.extend(one.gathers)
        self._gather_ahead()
        self._work(one.before_s)
        for part in one.forward:
            self._need(part.needs)
            self._work(part.work_s)
        self._work(one.repeats * one.computing_s)

    def _backward(self, one: Step) -> None:
        self._step = one
        self._phase = [0] * len(one.exchanges)
        """Collectives of each bucket that have started, plus one when the last result was decoded."""
        self._running: dict[int, _Running] = {}
        """The started collective of each bucket, in the order of their starts."""
        missing = [0] * len(one.exchanges)
        for arrival in one.arrivals:
            missing[arrival.bucket] += 1
        begun: set[int] = set()
        for arrival in one.arrivals:
            self._need(arrival.needs)
            self._work(arrival.gap_s)
            if arrival.bucket not in begun:
                begun.add(arrival.bucket)
                self._make_room(arrival.bucket)
            self._work(arrival.pack_s)
            missing[arrival.bucket] -= 1
            if not missing[arrival.bucket]:
                self._advance(arrival.bucket)
            self._advance_finished()
        self._work(one.tail_s)

    def _finish(self) -> None:
        """Start the buckets that are left, and wait for all."""
        late_s = self._step.late_s
        for bucket, phase in enumerate(list(self._phase)):
            if not phase:
                self._make_room(bucket)
                self._work(late_s[bucket] if bucket < len(late_s) else 0.0)
                self._advance(bucket)
        while self._running:
            if not self._advance_finished():
                self._wait_for(self._running[min(self._running)])

    def _make_room(self, bucket: int) -> None:
        """Wait for the oldest exchanges until a bucket fits within the limit."""
        while self._running and self._used_bytes(bucket) > self._step.limit_bytes:
            oldest = next(iter(self._running))
            self._wait_for(self._running[oldest])
            self._advance(oldest)

    def _used_bytes(self, bucket: int) -> float:
        """Return the memory of exchanges with another bucket, and of sums."""
        exchanges = self._step.exchanges
        kept = (e.kept_bytes for e, phase in zip(exchanges, self._phase, strict=True) if phase > len(e.collectives))
        return math.fsum(exchanges[other].nbytes for other in (*self._running, bucket)) + math.fsum(kept)

    def _advance_finished(self) -> bool:
        """Advance every bucket with a finished collective; return whether there was one."""
        moved = sorted(bucket for bucket, running in self._running.items() if running.finished)
        for bucket in moved:
            self._advance(bucket)
        return bool(moved)

    def _advance(self, bucket: int) -> None:
        """Start the next collective of a bucket, or decode the last result."""
        exchange, phase = self._step.exchanges[bucket], self._phase[bucket]
        self._running.pop(bucket, None)
        self._phase[bucket] += 1
        if phase == len(exchange.collectives):
            self._work(exchange.after_s)
            return
        self._running[bucket] = self._start(exchange.collectives[phase])

    def _start(self, collective: Collective) -> _Running:
        self._work(collective.before_s)
        share = min(1.0, collective.cpu_s / collective.wire_s) if collective.wire_s else 0.0
        running = _Running(collective.wire_s, share, finished=not collective.wire_s)
        if collective.wire_s:
            self._queue.append(running)
        self._work(collective.during_s)
        return running

    def _wait_for(self, running: _Running) -> None:
        while not running.finished:
            self._pass_time(self._queue[0].left_s)

    def _need(self, count: int) -> None:
        """Wait for the next gathers."""
        began = self._now
        for _ in range(count):
            if not self._gathering:
                self._start_gather()
            gather, running = self._gathering[0]
            self._wait_for(running)
            self._work(gather.after_s)
            self._gathering.popleft()
            self._gather_ahead()
        self._gather_s += self._now - began

    def _gather_ahead(self) -> None:
        """Start gathers in advance, up to the limit."""
        while self._gathers and self._ahead_bytes is not None:
            running = [gather for gather, _ in self._gathering]
            if running and math.fsum(g.nbytes for g in [*running, self._gathers[0]]) > self._ahead_bytes:
                return
            self._start_gather()

    def _start_gather(self) -> None:
        gather = self._gathers.popleft()
        (collective,) = gather.collectives
        self._gathering.append((gather, self._start(collective)))

    def _work(self, seconds: float) -> None:
        """Let the training thread work, more slowly while the exchange takes time from its core."""
        self._worked += seconds
        while seconds > 0:
            if not self._queue:
                self._now += seconds
                return
            first = self._queue[0]
            rate = 1.0 - first.cpu_share
            needed_s = seconds / rate if rate > 0 else math.inf
            took_s = min(needed_s, first.left_s)
            seconds = 0.0 if needed_s <= first.left_s else seconds - took_s * rate
            self._pass_time(took_s)

    def _pass_time(self, took_s: float) -> None:
        """Let time pass and the first collective progress."""
        self._now += took_s
        self._wire_s += took_s
        first = self._queue[0]
        if took_s >= first.left_s:
            self._queue.popleft()
            first.finished = True
        else:
            first.left_s -= took_s
