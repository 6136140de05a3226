"""Which hosts and devices slowed jobs: the stragglers of all starts of several runs together. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.observe.cost import S_PER_HOUR
from hvdtrain.timeline.analysis.shares import stragglers_of
from hvdtrain.timeline.analysis.straggler_causes import causes_of
from hvdtrain.timeline.analysis.stragglers import Stragglers
from hvdtrain.timeline.columns import StepTable

_LEAST_STEPS = 8


@dataclass
class Place:
    """A host, a device, or what a file names for hosts, such as a rack."""

    name: str
    host: str
    starts: int = 0  # starts of runs in which a rank there was compared with others
    slow_starts: int = 0  # those of them in which one was a straggler
    device_hours: float = 0.0  # that all devices of the jobs waited for stragglers there
    causes: Counter[str] = field(default_factory=Counter)  # of these stragglers, most frequent first


def slow_hosts(
    starts: Iterable[tuple[StepTable, Sequence[Mapping[str, Any]], Mapping[str, Any]]], group_of: Mapping[str, str]
) -> dict[str, list[Place]]:
    """Judge each start on its own, and add up: `hosts`, `devices` and `groups` of hosts, most costly first.

    A start has its stamps, its events ``shares`` and its config. A group of a host is such as its rack.
    """
    kinds: dict[str, dict[str, Place]] = {"hosts": {}, "devices": {}, "groups": {}}
    for table, shares, config in starts:
        found = stragglers_of(table, shares, config)
        if found is None or len(found.rounds.step) < _LEAST_STEPS:
            continue
        of_rank = []
        for host, device in zip(table.hosts, table.devices or [""] * len(table.hosts), strict=True):
            places = [kinds["hosts"].setdefault(host, Place(host, host))]
            if device:
                places.append(kinds["devices"].setdefault(device, Place(device, host)))
            if group := group_of.get(host):
                places.append(kinds["groups"].setdefault(group, Place(group, "")))
            of_rank.append(places)
        _add(found, table, of_rank)
    return {kind: sorted(each.values(), key=lambda p: (-p.device_hours, p.name)) for kind, each in kinds.items()}


def _add(found: Stragglers, table: StepTable, of_rank: Sequence[Sequence[Place]]) -> None:
    """Add a start to the places of its ranks."""
    steps, ranks = float(found.rounds.weight.sum()), len(of_rank)
    for place in {id(place): place for places in of_rank for place in places}.values():
        place.starts += 1
    slow: dict[int, Place] = {}
    for rank in found.late:
        causes = causes_of(rank, table, found)
        hours = max(0.0, found.cost_ms[rank].value) / 1e3 * steps * ranks / S_PER_HOUR
        for place in of_rank[rank]:
            place.device_hours += hours
            place.causes.update(cause.name for cause in causes[:1])
            slow[id(place)] = place
    for place in slow.values():
        place.slow_starts += 1
