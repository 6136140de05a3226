"""Which hosts and devices slowed jobs: the stragglers of all starts of several runs together. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hvdtrain.observe.cost import S_PER_HOUR
from hvdtrain.timeline.analysis.shares import stragglers_of
from hvdtrain.timeline.analysis.straggler_causes import causes_of
from hvdtrain.timeline.analysis.stragglers import Stragglers
from hvdtrain.timeline.columns import StampedStart

_LEAST_STEPS = 8
_HOURS_A_DAY = 24


@dataclass
class Place:
    """A host, a device, or what a file names for hosts, such as a rack. Times are seconds since 1970, None if unknown.

    The interval of `device_hours` is 95%.
    """

    name: str
    host: str
    starts: int = 0  # starts of runs in which a rank there was compared with others
    slow_starts: int = 0  # those of them in which one was a straggler
    device_hours: float = 0.0  # that all devices of the jobs waited for stragglers there
    device_hours_low: float = 0.0
    device_hours_high: float = 0.0
    device_hours_per_day: float = 0.0  # lost while it is slow, by the newest start in which it was
    slow_now: bool = False  # it was slow at the end of the newest start in which it was compared
    slow_since: float | None = None  # when that began, also over starts; None if it is not slow now
    last_slow: float | None = None  # the last step in which it was slow
    last_seen: float | None = None  # the last step of a job there
    causes: Counter[str] = field(default_factory=Counter)  # of these stragglers, most frequent first
    wrong_bits: int = 0  # how often a second rank found a rank there wrong


def slow_hosts(starts: Iterable[StampedStart], group_of: Mapping[str, str]) -> dict[str, list[Place]]:
    """Judge each start on its own, and add up: `hosts`, `devices` and `groups` of hosts, most costly first.

    A group of a host is such as its rack.
    """
    kinds: dict[str, dict[str, Place]] = {"hosts": {}, "devices": {}, "groups": {}}
    for start in sorted(starts, key=lambda each: each.time_s(-1) or -math.inf):
        table = start.steps
        of_rank = []
        for host, device in zip(table.hosts, table.devices or [""] * len(table.hosts), strict=True):
            places = [kinds["hosts"].setdefault(host, Place(host, host))]
            if device:
                places.append(kinds["devices"].setdefault(device, Place(device, host)))
            if group := group_of.get(host):
                places.append(kinds["groups"].setdefault(group, Place(group, "")))
            of_rank.append(places)
            for place in places:
                place.last_seen = start.time_s(-1) or place.last_seen
        for rank in [event["rank"] for event in start.wrong if event.get("rank") in range(len(of_rank))]:
            for place in of_rank[rank]:
                place.wrong_bits += 1
        found = stragglers_of(table, start.shares, start.config)
        if found is not None and len(found.rounds.step) >= _LEAST_STEPS:
            _add(found, start, of_rank)
    compared = {kind: [p for p in each.values() if p.starts or p.wrong_bits] for kind, each in kinds.items()}
    return {kind: sorted(each, key=lambda p: (-p.device_hours, p.name)) for kind, each in compared.items()}


def _add(found: Stragglers, start: StampedStart, of_rank: Sequence[Sequence[Place]]) -> None:
    hours = float(found.rounds.weight.sum()) * len(of_rank) / 1e3 / S_PER_HOUR  # of all devices, per ms of a step
    ranks: dict[int, tuple[Place, list[int]]] = {}
    for rank, places in enumerate(of_rank):
        for place in places:
            ranks.setdefault(id(place), (place, []))[1].append(rank)
    for place, own in ranks.values():
        place.starts += 1
        late = [rank for rank in own if rank in found.late]
        costs = [found.cost_ms[rank] for rank in late]
        value, low, high = (hours * sum(max(0.0, getattr(c, name)) for c in costs) for name in ("value", "low", "high"))
        below = math.hypot(place.device_hours - place.device_hours_low, value - low)  # starts are independent
        above = math.hypot(place.device_hours_high - place.device_hours, high - value)
        place.device_hours += value
        place.device_hours_low, place.device_hours_high = place.device_hours - below, place.device_hours + above
        place.causes.update(cause.name for rank in late for cause in causes_of(rank, start.steps, found)[:1])
        _note_spells(place, {rank: (found.spells(rank) or [found])[-1] for rank in late}, found, start)


def _note_spells(place: Place, newest: Mapping[int, Stragglers], found: Stragglers, start: StampedStart) -> None:
    """Note when a place was slow: by rank, what was found in the newest steps in which it was late."""
    lasting = [each for each in newest.values() if each.rounds.step[-1] == found.rounds.step[-1]]
    place.slow_now = bool(lasting)
    place.slow_starts += bool(newest)
    if newest:
        lost = 0.0
        for rank, spell in newest.items():
            columns = spell.rounds.steps()
            step_ms = float(np.median(start.steps.end_us[0, columns] - start.steps.start_us[0, columns])) / 1e3
            lost += max(0.0, spell.cost_ms[rank].value) / step_ms
            place.last_slow = start.time_s(int(columns[-1])) or place.last_slow
        place.device_hours_per_day = lost * len(found.rounds.hosts) * _HOURS_A_DAY
    first = min((int(each.rounds.steps()[0]) for each in lasting), default=0)
    if not lasting:
        place.slow_since = None
    elif place.slow_since is None or first > int(found.rounds.steps()[0]):
        place.slow_since = start.time_s(first)
