"""A step replayed by small ticks, the plain way: no events, no shortcuts. For tests, of times that are whole ticks."""

from __future__ import annotations

from collections.abc import Iterator

from hvdtrain.timeline.whatif.replay import Step

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
    missing = [sum(a.bucket == number for a in step.arrivals) for number in range(len(step.exchanges))]
    phase = [-1] * len(missing)
    number_of: dict[int, int] = {}
    handed = iter(range(1 << 20))

    def go_on(bucket: int) -> Iterator[float | str]:
        phase[bucket] += 1
        exchange = step.exchanges[bucket]
        if phase[bucket] == len(exchange.collectives):
            yield exchange.after_s
            return
        collective = exchange.collectives[phase[bucket]]
        yield collective.before_s
        number_of[bucket] = next(handed)
        if collective.wire_s:
            share = 1.0 if collective.cpu_s >= collective.wire_s else 0.0
            wire.queue.append([number_of[bucket], collective.wire_s, share])
        else:
            wire.over.add(number_of[bucket])
        yield collective.during_s

    def running() -> list[int]:
        return [b for b in range(len(missing)) if 0 <= phase[b] < len(step.exchanges[b].collectives)]

    def ready() -> list[int]:
        return [b for b in running() if number_of[b] in wire.over]

    yield step.before_s
    for arrival in step.arrivals:
        yield arrival.gap_s
        yield arrival.pack_s
        missing[arrival.bucket] -= 1
        if not missing[arrival.bucket]:
            yield from go_on(arrival.bucket)
        for bucket in ready():
            yield from go_on(bucket)
    yield step.tail_s
    marks["backward"] = now()
    for bucket in range(len(missing)):
        if phase[bucket] < 0:
            yield step.late_s[bucket] if bucket < len(step.late_s) else 0.0
            yield from go_on(bucket)
    while running():
        moved = ready()
        for bucket in moved:
            yield from go_on(bucket)
        if not moved:
            first = running()[0]
            while number_of[first] not in wire.over:
                yield NOTHING
    marks["over"] = now()
    yield step.after_s
