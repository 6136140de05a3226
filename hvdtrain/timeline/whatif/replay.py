"""One step of a rank, replayed: what the training thread does, and the one that exchanges meanwhile. Pure.

The order of things is that of `exchange.flight`: a gradient is packed when backward has it; a bucket is started when it
is full; exchanges of several collectives are taken on from the next gradient's arrival, and after backward until all
are over. Collectives are carried out one after another, in the order in which they were handed over. All times are in
seconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Collective:
    """One collective.

    Attributes:
        before_s: of the training thread, to make what is sent.
        wire_s: from being handed over to its end, with nothing before it.
        cpu_s: of the core that computes, where both share it; at most `wire_s`.
        during_s: of the training thread, what it does as soon as it has handed it over.
    """

    before_s: float
    wire_s: float
    cpu_s: float = 0.0
    during_s: float = 0.0


@dataclass(frozen=True)
class Exchange:
    """A bucket's way.

    Attributes:
        collectives: each begins when the one before is over and what it sends is made.
        after_s: of the training thread, to decode what the last one brought.
    """

    collectives: Sequence[Collective]
    after_s: float = 0.0


@dataclass(frozen=True)
class Arrival:
    """A gradient.

    Attributes:
        gap_s: computing since the one before, or since backward began.
        pack_s: to put it into its bucket.
        bucket: which.
    """

    gap_s: float
    pack_s: float
    bucket: int


@dataclass(frozen=True)
class Step:
    """A step of a rank.

    Attributes:
        before_s: until the last backward pass begins.
        arrivals: in the order in which backward has them.
        tail_s: of backward, after the last of them.
        exchanges: of the buckets.
        late_s: packing what backward leaves out, by bucket; those buckets start after it.
        after_s: when all sums are there: clipping, optimizer, all else.
    """

    before_s: float
    arrivals: Sequence[Arrival]
    tail_s: float
    exchanges: Sequence[Exchange]
    late_s: Sequence[float] = ()
    after_s: float = 0.0


@dataclass(frozen=True)
class Replayed:
    """What came of it.

    Attributes:
        step_s: all of it.
        compute_s: the training thread's own work.
        backward_s: the last backward pass, with what was packed and coded meanwhile.
        wait_s: from the end of backward until all sums were there.
        wire_s: the exchanging thread's time, in all.
    """

    step_s: float
    compute_s: float
    backward_s: float
    wait_s: float
    wire_s: float


def replay(step: Step) -> Replayed:
    """Carry it out."""
    return _Replay(step).run()


@dataclass
class _Way:
    """A collective that was handed over; of its time, what is left."""

    bucket: int
    left_s: float
    share: float


class _Replay:
    def __init__(self, step: Step) -> None:
        self._step = step
        self._now = 0.0
        self._worked = 0.0
        self._wire_s = 0.0
        self._queue: deque[_Way] = deque()
        """Collectives that are not over; the first is on its way."""
        self._phase = [0] * len(step.exchanges)
        """Collectives of each bucket that were handed over, and one more when the last was decoded."""
        self._running: dict[int, bool] = {}
        """Buckets of which a collective was handed over, and whether it is over."""

    def run(self) -> Replayed:
        step = self._step
        self._work(step.before_s)
        backward_began = self._now
        missing = [0] * len(step.exchanges)
        for arrival in step.arrivals:
            missing[arrival.bucket] += 1
        for arrival in step.arrivals:
            self._work(arrival.gap_s + arrival.pack_s)
            missing[arrival.bucket] -= 1
            if not missing[arrival.bucket]:
                self._send(arrival.bucket)
            self._advance()
        self._work(step.tail_s)
        backward_end = self._now
        for bucket, phase in enumerate(list(self._phase)):
            if not phase:
                self._work(step.late_s[bucket] if bucket < len(step.late_s) else 0.0)
                self._send(bucket)
        while self._running:
            if not self._advance():
                self._wait_for(min(self._running))
        wait_s = self._now - backward_end
        self._work(step.after_s)
        return Replayed(self._now, self._worked, backward_end - backward_began, wait_s, self._wire_s)

    def _advance(self) -> bool:
        """Take on what can be; whether anything could."""
        moved = sorted(bucket for bucket, over in self._running.items() if over)
        for bucket in moved:
            self._send(bucket)
        return bool(moved)

    def _send(self, bucket: int) -> None:
        """Hand over the next collective of a bucket, or decode what the last one brought."""
        exchange, phase = self._step.exchanges[bucket], self._phase[bucket]
        self._running.pop(bucket, None)
        self._phase[bucket] += 1
        if phase == len(exchange.collectives):
            self._work(exchange.after_s)
            return
        collective = exchange.collectives[phase]
        self._work(collective.before_s)
        self._running[bucket] = not collective.wire_s
        if collective.wire_s:
            share = min(1.0, collective.cpu_s / collective.wire_s)
            self._queue.append(_Way(bucket, collective.wire_s, share))
        self._work(collective.during_s)

    def _work(self, seconds: float) -> None:
        """Let the training thread work so long, at less than full speed where the exchange takes from its core."""
        self._worked += seconds
        while seconds > 0:
            if not self._queue:
                self._now += seconds
                return
            way = self._queue[0]
            rate = 1.0 - way.share
            here_s = seconds / rate if rate > 0 else math.inf
            took_s = min(here_s, way.left_s)
            seconds = 0.0 if here_s <= way.left_s else seconds - took_s * rate
            self._carry(took_s)

    def _wait_for(self, bucket: int) -> None:
        """Stand still until the collective of a bucket is over."""
        while not self._running[bucket]:
            self._carry(self._queue[0].left_s)

    def _carry(self, took_s: float) -> None:
        """Let time pass, and as much of the first collective be done."""
        self._now += took_s
        self._wire_s += took_s
        way = self._queue[0]
        if took_s >= way.left_s:
            self._queue.popleft()
            self._running[way.bucket] = True
        else:
            way.left_s -= took_s
