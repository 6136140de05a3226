"""Measure links with TCP connections between the probes of hosts, if MPI is not available."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.doctor.hosts.probe_client import NoAnswerError
from hvdtrain.doctor.hosts.survey import Hosts
from hvdtrain.doctor.links.link_pairs import budget_s, rounds
from hvdtrain.doctor.links.measured import Direction, Links


def measure(hosts: Hosts, names: Sequence[str]) -> Links:
    """Measure all pairs of `names`, which reach each other. Pairs without a common host are measured in parallel."""
    each_s = budget_s(len(names))
    directions: list[Direction] = []

    def one(pair: tuple[str, str]) -> Direction | None:
        try:
            speed = hosts.measure(*pair, each_s)
        except NoAnswerError:
            return None
        return Direction(*pair, speed.latency_s, speed.bytes_per_s)

    for pairs in rounds(len(names)):
        forward = [(names[a], names[b]) for a, b in pairs]
        for batch in (forward, [(b, a) for a, b in forward]):
            directions += [found for found in hosts.in_parallel(one, batch) if found is not None]
    return Links(list(names), directions, "TCP, one stream")
