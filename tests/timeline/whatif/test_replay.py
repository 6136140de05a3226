"""A replayed step: by hand, by an oracle of ticks, and what must hold of any."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.timeline.whatif.replay import Arrival, Collective, Exchange, Part, Step, replay


def _plain(wire_s: float, cpu_s: float = 0.0) -> Exchange:
    return Exchange([Collective(0, wire_s, cpu_s)])


def oracle(step: Step) -> tuple[float, float]:
    """Ticks of the step, and of its wait. Shares of the core must be 0 or 1."""
    thread = _Thread()
    last: _Sums | None = None
    for one in [*step.earlier, step]:
        thread.gather_ahead(one, one.gathers)
        thread.work(one.before_s)
        for part in one.forward:
            thread.need(one, part.needs)
            thread.work(part.work_s)
        thread.work(one.repeats * (sum(arrival.gap_s for arrival in one.arrivals) + one.tail_s))
        if last is not None:
            last.finish()
        last = _Sums(one, thread)
        for arrival in one.arrivals:
            thread.need(one, arrival.needs)
            thread.work(arrival.gap_s)
            last.pack(arrival)
        thread.work(one.tail_s)
    backward = thread.now
    assert last is not None
    last.finish()
    over = thread.now
    thread.work(step.after_s)
    return thread.now, over - backward


class _Thread:
    """The training thread, and what is sent beside it: collectives one after another, a tick at a time."""

    def __init__(self) -> None:
        self.now = 0
        self.over: set[int] = set()
        self._numbers = count()
        self._queue: list[list[float]] = []
        """Of each collective: its number, what is left of it, its share of the core."""
        self._waiting: list[Exchange] = []
        self._gathering: list[tuple[Exchange, int]] = []

    def _tick(self) -> float:
        """Carry on; the share of the core that the collective takes."""
        self.now += 1
        if not self._queue:
            return 0.0
        number, left, share = self._queue[0]
        self._queue[0][1] = left - 1
        if left <= 1:
            self._queue.pop(0)
            self.over.add(int(number))
        return share

    def work(self, ticks: float) -> None:
        done = 0
        while done < ticks:
            done += self._tick() == 0.0

    def wait(self, number: int) -> None:
        while number not in self.over:
            self._tick()

    def start(self, collective: Collective) -> int:
        self.work(collective.before_s)
        number = next(self._numbers)
        if collective.wire_s:
            self._queue.append([number, collective.wire_s, float(collective.cpu_s >= collective.wire_s)])
        else:
            self.over.add(number)
        self.work(collective.during_s)
        return number

    def _gather_one(self) -> None:
        gather = self._waiting.pop(0)
        self._gathering.append((gather, self.start(gather.collectives[0])))

    def gather_ahead(self, one: Step, more: list[Exchange]) -> None:
        self._waiting += more
        while one.ahead_bytes is not None and self._waiting:
            held = sum(gather.nbytes for gather, _ in self._gathering)
            if self._gathering and held + self._waiting[0].nbytes > one.ahead_bytes:
                return
            self._gather_one()

    def need(self, one: Step, number: int) -> None:
        for _ in range(number):
            if not self._gathering:
                self._gather_one()
            self.wait(self._gathering[0][1])
            self.work(self._gathering[0][0].after_s)
            self._gathering.pop(0)
            self.gather_ahead(one, [])


class _Sums:
    """The exchanges of one pass."""

    def __init__(self, step: Step, thread: _Thread) -> None:
        self.step, self.thread = step, thread
        self.missing = [sum(a.bucket == number for a in step.arrivals) for number in range(len(step.exchanges))]
        self.arrived = list(self.missing)
        self.phase = [-1] * len(self.missing)
        self.number_of: dict[int, int] = {}
        self.started: list[int] = []
        """Buckets by the start of their current collectives."""

    def pack(self, arrival: Arrival) -> None:
        bucket = arrival.bucket
        if self.missing[bucket] == self.arrived[bucket]:
            self.make_room(bucket)
        self.thread.work(arrival.pack_s)
        self.missing[bucket] -= 1
        if not self.missing[bucket]:
            self.go_on(bucket)
        for ready in self.ready():
            self.go_on(ready)

    def make_room(self, bucket: int) -> None:
        exchanges = self.step.exchanges
        while self.started and (
            sum(exchanges[b].nbytes for b in self.started)
            + sum(e.kept_bytes for e, phase in zip(exchanges, self.phase, strict=True) if phase == len(e.collectives))
            + exchanges[bucket].nbytes
            > self.step.limit_bytes
        ):
            oldest = self.started[0]
            self.thread.wait(self.number_of[oldest])
            self.go_on(oldest)

    def go_on(self, bucket: int) -> None:
        if bucket in self.started:
            self.started.remove(bucket)
        self.phase[bucket] += 1
        exchange = self.step.exchanges[bucket]
        if self.phase[bucket] == len(exchange.collectives):
            self.thread.work(exchange.after_s)
            return
        self.number_of[bucket] = self.thread.start(exchange.collectives[self.phase[bucket]])
        self.started.append(bucket)

    def ready(self) -> list[int]:
        return sorted(b for b in self.started if self.number_of[b] in self.thread.over)

    def finish(self) -> None:
        for bucket in range(len(self.missing)):
            if self.phase[bucket] < 0:
                self.make_room(bucket)
                self.thread.work(self.step.late_s[bucket] if bucket < len(self.step.late_s) else 0.0)
                self.go_on(bucket)
        while self.started:
            moved = self.ready()
            for bucket in moved:
                self.go_on(bucket)
            if not moved:
                self.thread.wait(self.number_of[min(self.started)])


def test_what_backward_leaves_out_is_packed_and_sent_after_it() -> None:
    step = Step(0, [Arrival(5, 0, 0)], 0, [_plain(1), _plain(3)], late_s=[0, 2])
    assert replay(step).step_s == 10
    assert replay(step).wait_s == 5


WHOLE = st.integers(0, 6).map(float)


@st.composite
def passes(draw: st.DrawFn) -> Step:
    """Small ones, in whole ticks; a collective takes all of the core or none of it."""

    def collective() -> Collective:
        wire_s = draw(WHOLE)
        return Collective(draw(WHOLE), wire_s, wire_s * draw(st.integers(0, 1)), draw(WHOLE))

    buckets = draw(st.integers(1, 4))
    exchanges = [
        Exchange(
            [collective() for _ in range(draw(st.integers(0, 3)))],
            *(draw(WHOLE), draw(WHOLE), draw(WHOLE)),
        )
        for _ in range(buckets)
    ]
    gathers = [Exchange([collective()], draw(WHOLE), draw(WHOLE)) for _ in range(draw(st.integers(0, 4)))]
    left = len(gathers)
    forward = []
    for _ in range(draw(st.integers(0, 3))):
        forward.append(Part(needs := draw(st.integers(0, left)), draw(WHOLE)))
        left -= needs
    arrivals = []
    for _ in range(draw(st.integers(0, 6))):
        needs = draw(st.integers(0, left))
        arrivals.append(Arrival(draw(WHOLE), draw(WHOLE), draw(st.integers(0, buckets - 1)), needs))
        left -= needs
    return Step(
        draw(WHOLE),
        arrivals,
        draw(WHOLE),
        exchanges,
        after_s=draw(WHOLE),
        forward=forward,
        gathers=gathers[: len(gathers) - left],
        ahead_bytes=draw(st.none() | WHOLE),
        limit_bytes=draw(st.just(math.inf) | WHOLE),
        repeats=draw(st.integers(0, 2)),
    )


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """One to three passes."""
    return replace(draw(passes()), earlier=[replace(one, after_s=0) for one in draw(st.lists(passes(), max_size=2))])


def test_passes_before_the_last_one_only_compute() -> None:
    """The last one packs, too, and waits."""
    found = replay(Step(1, [Arrival(5, 2, 0)], 3, [_plain(7)], after_s=1, repeats=3))
    assert (found.step_s, found.wait_s, found.backward_s) == (1 + 3 * 8 + 5 + 2 + 7 + 1, 4, (3 * 8 + 10) / 4)


@given(steps())
@settings(max_examples=200, deadline=None)
def test_the_schedule_is_that_of_an_oracle_of_ticks(step: Step) -> None:
    found = replay(step)
    assert (found.step_s, found.wait_s) == pytest.approx(oracle(step))


@given(steps(), st.floats(1, 5))
@settings(deadline=None)
def test_one_collective_a_bucket_that_is_slower_makes_no_step_faster(step: Step, factor: float) -> None:
    single = [replace(e, collectives=e.collectives[:1]) for e in step.exchanges]
    slow = [
        replace(e, collectives=[replace(c, wire_s=c.wire_s * factor, cpu_s=c.cpu_s * factor) for c in e.collectives])
        for e in single
    ]
    before, after = (replay(replace(step, exchanges=exchanges)) for exchanges in (single, slow))
    # A faster exchange may be decoded before another bucket starts, which then starts later by that time.
    decoding_s = sum(e.after_s for e in single)
    assert after.step_s >= before.step_s - decoding_s - 1e-9
    assert before.step_s >= before.compute_s - 1e-9
