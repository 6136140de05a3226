"""A step replayed by small ticks, the plain way: no events, no shortcuts. For tests, of times that are whole ticks."""

from __future__ import annotations

from itertools import count

from hvdtrain.timeline.whatif.step import Arrival, Collective, Exchange, Step


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
