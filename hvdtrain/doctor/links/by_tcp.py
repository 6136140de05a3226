"""Links measured by plain connections between the hosts' probes: where ranks have no MPI to do it by."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.doctor.hosts.asking import SilentError
from hvdtrain.doctor.hosts.survey import Hosts
from hvdtrain.doctor.links.link_pairs import budget_s, rounds
from hvdtrain.doctor.links.measured import Links, Way

BY = "TCP, one stream"


def measure(hosts: Hosts, names: Sequence[str]) -> Links:
    """Measure all pairs, those that do not disturb each other at the same time.

    Args:
        hosts: that have been asked what they are.
        names: of those that reach each other.
    """
    each_s = budget_s(len(names))
    ways: list[Way] = []

    def one(pair: tuple[str, str]) -> Way | None:
        try:
            speed = hosts.measure(*pair, each_s)
        except SilentError:
            return None
        return Way(*pair, speed.latency_s, speed.bytes_per_s)

    for pairs in rounds(len(names)):
        there = [(names[a], names[b]) for a, b in pairs]
        for way in (there, [(b, a) for a, b in there]):
            ways += [found for found in hosts.together(one, way) if found is not None]
    return Links(list(names), ways, BY)
