"""A step replayed by small ticks, the plain way: no events, no shortcuts. For tests, of times that are whole ticks."""

from __future__ import annotations

from collections.abc import Iterator

from hvdtrain.timeline.whatif.step import Arrival, Collective, Exchange, Step

NOTHING = "nothing"


class Wire:
    """Collectives one after another, a tick at a time."""

    def __init__(self) -> None:
        self.queue: list[list[float]] = []
        """Of each: its number, what is left of it, its share of the core."""
        self.over: set[int] = set()
        self.used = 0.0

    def tick(self) -> float:
        """Carry on; the share of the core that it takes."""
        if not self.queue:
            return 0.0
        number, left, share = self.queue[0]
        self.queue[0][1] = left - 1
        self.used += 1
        if left <= 1:
            self.queue.pop(0)
            self.over.add(int(number))
        return share


def oracle(step: Step) -> tuple[float, float]:
    """Ticks of the step, and of its wait. Shares of the core must be 0 or 1."""
    wire = Wire()
    now = 0
    marks: dict[str, int] = {}

    def clock() -> int:
        return now

    for what in _thread(step, wire, marks, clock):
        if what == NOTHING:
            wire.tick()
            now += 1
            continue
        done = 0
        while done < what:
            done += wire.tick() == 0.0
            now += 1
    return now, marks["over"] - marks["backward"]


def _thread(step: Step, wire: Wire, marks: dict[str, int], now) -> Iterator[float | str]:  # type: ignore[no-untyped-def]
    """What the training thread does: ticks of work, or `NOTHING` while it waits."""
    handed = iter(range(1 << 20))
    waiting: list[Exchange] = []
    gathering: list[tuple[Exchange, int]] = []
    last: Sums | None = None

    def start(collective: Collective) -> Iterator[float | str]:
        yield collective.before_s
        number = next(handed)
        if collective.wire_s:
            share = 1.0 if collective.cpu_s >= collective.wire_s else 0.0
            wire.queue.append([number, collective.wire_s, share])
        else:
            wire.over.add(number)
        yield collective.during_s
        return number

    def wait(number: int) -> Iterator[float | str]:
        while number not in wire.over:
            yield NOTHING

    def gather_one() -> Iterator[float | str]:
        gather = waiting.pop(0)
        number = yield from start(gather.collectives[0])
        gathering.append((gather, number))

    def gather_ahead(one: Step) -> Iterator[float | str]:
        if one.ahead_bytes is None:
            return
        while waiting:
            held = sum(g.nbytes for g, _ in gathering)
            if gathering and held + waiting[0].nbytes > one.ahead_bytes:
                return
            yield from gather_one()

    def need(one: Step, count: int) -> Iterator[float | str]:
        for _ in range(count):
            if not gathering:
                yield from gather_one()
            yield from wait(gathering[0][1])
            yield gathering[0][0].after_s
            gathering.pop(0)
            yield from gather_ahead(one)

    for one in [*step.earlier, step]:
        waiting += one.gathers
        yield from gather_ahead(one)
        yield one.before_s
        for part in one.forward:
            yield from need(one, part.needs)
            yield part.work_s
        if last is not None:
            yield from last.finish()
        last = Sums(one, start, wait, wire)
        for arrival in one.arrivals:
            yield from need(one, arrival.needs)
            yield arrival.gap_s
            yield from last.pack(arrival)
        yield one.tail_s
    marks["backward"] = now()
    assert last is not None
    yield from last.finish()
    marks["over"] = now()
    yield step.after_s


class Sums:
    """The exchanges of one pass."""

    def __init__(self, step: Step, start, wait, wire: Wire) -> None:  # type: ignore[no-untyped-def]
        self.step, self.start, self.wait, self.wire = step, start, wait, wire
        self.missing = [sum(a.bucket == number for a in step.arrivals) for number in range(len(step.exchanges))]
        self.arrived = list(self.missing)
        self.phase = [-1] * len(self.missing)
        self.number_of: dict[int, int] = {}
        self.started: list[int] = []
        """Buckets by the start of their current collectives."""

    def pack(self, arrival: Arrival) -> Iterator[float | str]:
        bucket = arrival.bucket
        if self.missing[bucket] == self.arrived[bucket]:
            yield from self.make_room(bucket)
        yield arrival.pack_s
        self.missing[bucket] -= 1
        if not self.missing[bucket]:
            yield from self.go_on(bucket)
        for ready in self.ready():
            yield from self.go_on(ready)

    def make_room(self, bucket: int) -> Iterator[float | str]:
        exchanges = self.step.exchanges
        while self.started and (
            sum(exchanges[b].nbytes for b in self.started)
            + sum(e.kept_bytes for e, phase in zip(exchanges, self.phase, strict=True) if phase == len(e.collectives))
            + exchanges[bucket].nbytes
            > self.step.limit_bytes
        ):
            oldest = self.started[0]
            yield from self.wait(self.number_of[oldest])
            yield from self.go_on(oldest)

    def go_on(self, bucket: int) -> Iterator[float | str]:
        if bucket in self.started:
            self.started.remove(bucket)
        self.phase[bucket] += 1
        exchange = self.step.exchanges[bucket]
        if self.phase[bucket] == len(exchange.collectives):
            yield exchange.after_s
            return
        self.number_of[bucket] = yield from self.start(exchange.collectives[self.phase[bucket]])
        self.started.append(bucket)

    def ready(self) -> list[int]:
        return sorted(b for b in self.started if self.number_of[b] in self.wire.over)

    def finish(self) -> Iterator[float | str]:
        for bucket in range(len(self.missing)):
            if self.phase[bucket] < 0:
                yield from self.make_room(bucket)
                yield self.step.late_s[bucket] if bucket < len(self.step.late_s) else 0.0
                yield from self.go_on(bucket)
        while self.started:
            moved = self.ready()
            for bucket in moved:
                yield from self.go_on(bucket)
            if not moved:
                yield from self.wait(self.number_of[min(self.started)])
