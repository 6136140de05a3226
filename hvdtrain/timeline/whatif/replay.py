"""Replay one step of a rank: its training thread, and the thread that exchanges gradients next to it. Pure.

The order is that of `exchange.bucket_exchange`. A gradient is packed when backward has finished it. A bucket starts
when it is full. An exchange of several collectives continues when the next gradient arrives, and after backward until
all exchanges have finished. Collectives run one after another, in the order in which they started. All times are in
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
        before_s, during_s: work of the training thread to make the payload, and right after the start.
        wire_s: from its start to its end if no other collective is ahead of it.
        cpu_s: processor time that it takes from computing, if both share a core; at most `wire_s`.
    """

    before_s: float
    wire_s: float
    cpu_s: float = 0.0
    during_s: float = 0.0


@dataclass(frozen=True)
class Exchange:
    """The exchange of a bucket: a collective starts when the previous one has finished and its own payload is made.

    `after_s` is the work of the training thread to decode the last result.
    """

    collectives: Sequence[Collective]
    after_s: float = 0.0


@dataclass(frozen=True)
class Arrival:
    """A gradient: computing since the previous one or since backward began, and the time to pack it into its bucket."""

    gap_s: float
    pack_s: float
    bucket: int


@dataclass(frozen=True)
class Step:
    """A step of a rank.

    Attributes:
        before_s: until the last backward pass begins.
        arrivals: gradients in the order in which backward finishes them.
        tail_s: backward after the last gradient.
        late_s: time to pack the gradients that backward skips, by bucket; those buckets start after backward.
        after_s: from the last sum to the end of the step: clipping, optimizer, everything else.
    """

    before_s: float
    arrivals: Sequence[Arrival]
    tail_s: float
    exchanges: Sequence[Exchange]
    late_s: Sequence[float] = ()
    after_s: float = 0.0


@dataclass(frozen=True)
class Replayed:
    """The durations of a replayed step.

    Attributes:
        compute_s: the training thread's own work.
        backward_s: the last backward pass, with packing and coding during it.
        wait_s: from the end of backward to the last sum.
        wire_s: the exchanging thread's work.
    """

    step_s: float
    compute_s: float
    backward_s: float
    wait_s: float
    wire_s: float


def replay(step: Step) -> Replayed:
    """Return the durations of a step."""
    return _Replay(step).run()


@dataclass
class _Running:
    """A collective that has started, and the seconds that it still needs."""

    bucket: int
    left_s: float
    cpu_share: float


class _Replay:
    def __init__(self, step: Step) -> None:
        self._step = step
        self._now = 0.0
        self._worked = 0.0
        self._wire_s = 0.0
        self._queue: deque[_Running] = deque()
        """Collectives that have not finished; the first one is in progress."""
        self._phase = [0] * len(step.exchanges)
        """Collectives of each bucket that have started, plus one when the last result was decoded."""
        self._finished: dict[int, bool] = {}
        """Buckets with a collective that has started, and whether it has finished."""

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
                self._advance(arrival.bucket)
            self._advance_finished()
        self._work(step.tail_s)
        backward_end = self._now
        for bucket, phase in enumerate(list(self._phase)):
            if not phase:
                self._work(step.late_s[bucket] if bucket < len(step.late_s) else 0.0)
                self._advance(bucket)
        while self._finished:
            if not self._advance_finished():
                bucket = min(self._finished)
                while not self._finished[bucket]:
                    self._pass_time(self._queue[0].left_s)
        wait_s = self._now - backward_end
        self._work(step.after_s)
        return Replayed(self._now, self._worked, backward_end - backward_began, wait_s, self._wire_s)

    def _advance_finished(self) -> bool:
        """Advance every bucket with a finished collective; return whether there was one."""
        moved = sorted(bucket for bucket, finished in self._finished.items() if finished)
        for bucket in moved:
            self._advance(bucket)
        return bool(moved)

    def _advance(self, bucket: int) -> None:
        """Start the next collective of a bucket, or decode the last result."""
        exchange, phase = self._step.exchanges[bucket], self._phase[bucket]
        self._finished.pop(bucket, None)
        self._phase[bucket] += 1
        if phase == len(exchange.collectives):
            self._work(exchange.after_s)
            return
        collective = exchange.collectives[phase]
        self._work(collective.before_s)
        self._finished[bucket] = not collective.wire_s
        if collective.wire_s:
            share = min(1.0, collective.cpu_s / collective.wire_s)
            self._queue.append(_Running(bucket, collective.wire_s, share))
        self._work(collective.during_s)

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
            self._finished[first.bucket] = True
        else:
            first.left_s -= took_s
