"""How long a collective takes: latency and bytes over a link, by algorithm, number of ranks and of hosts. Pure.

Hockney's model ("The Communication Challenge for MPP", 1994), with the costs of a ring and of recursive doubling as
Thakur, Rabenseifner and Gropp have them ("Optimization of Collective Communication Operations in MPICH", 2005).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Algorithm = Literal["auto", "ring", "tree"]

_NEGOTIATION = 2
"""Reductions of a few bytes by which Horovod's ranks agree that a tensor is ready on all (its cache knows it)."""
_LARGE = 0.1
"""Of the largest that was measured."""
_APART = 2
"""By how much two sizes differ that are far apart."""
ETHERNET = 0.94
"""Of a link's bits a second, those that are payload: 1448 bytes in each packet of TCP over Ethernet, which takes 1538
with its headers, preamble and gap. Allreduces of 1 to 8 MB between two hosts got 0.94 to 0.955 of 0.1 to 1 Gbit/s, of a
link that counts neither preamble nor gap."""


@dataclass(frozen=True)
class Link:
    """What ranks exchange by.

    Attributes:
        hop_s: a message of next to nothing from one rank to another.
        s_per_byte: that leaves a host, or where there is one host a rank.
        cpu_s_per_byte: processor time of the exchanging thread for a byte that its rank sends.
    """

    hop_s: float
    s_per_byte: float
    cpu_s_per_byte: float = 0.0


ONE_HOST = Link(2e-5, 2.5e-10, 2.5e-10)
"""Between ranks of one host, where nothing was measured: 4 GB/s through memory, all of it a core's work."""


@dataclass(frozen=True)
class Ranks:
    """How many, and where.

    Attributes:
        size: ranks.
        per_host: of them on a host.
    """

    size: int
    per_host: int

    @property
    def hosts(self) -> int:
        """How many."""
        return -(-self.size // self.per_host)


def rounds(count: int) -> int:
    """Of a tree over so many."""
    return max(0, (count - 1).bit_length())


def collective_s(
    link: Link, ranks: Ranks, kind: str, nbytes: float, algorithm: Algorithm = "auto"
) -> tuple[float, float]:
    """Seconds from the time when all ranks are ready, and processor seconds of the exchanging thread.

    Args:
        link: between hosts, or on the one host.
        ranks: that take part.
        kind: allreduce, allgather or alltoall.
        nbytes: that each rank hands over.
        algorithm: of an allreduce; auto takes whichever is faster.
    """
    if ranks.size < 2:
        return 0.0, 0.0
    ways = _allreduce(ranks, nbytes) if kind == "allreduce" else {"ring": _others(ranks, kind, nbytes)}
    taken = [ways[algorithm]] if algorithm in ways else list(ways.values())
    negotiation_s = _NEGOTIATION * rounds(ranks.size) * link.hop_s
    found = []
    for hops, crossing, sent in taken:
        cpu_s = sent * link.cpu_s_per_byte
        found.append((negotiation_s + hops * link.hop_s + max(crossing * link.s_per_byte, cpu_s), cpu_s))
    return min(found)


def fit(pairs: Sequence[tuple[int, float]], ranks: Ranks) -> Link | None:
    """The link by which allreduces of so many bytes took so many seconds; None where they do not say.

    The least takes the latency, the rest the slope, in least squares of relative errors. Between hosts the slope is
    that between the two largest, where these are far apart: what a link lets pass at once is in both.
    """
    points = sorted((size, seconds) for size, seconds in pairs if seconds > 0)
    if len(points) < 2 or points[0][0] == points[-1][0] or ranks.size < 2:
        return None
    hop_s = points[0][1] / ((_NEGOTIATION + 1) * rounds(ranks.size))
    numerator = denominator = 0.0
    (size, seconds), (largest, longest) = points[-2:]
    if ranks.hosts > 1 and size * _APART <= largest and seconds < longest:
        bytes_more = _allreduce(ranks, largest)["ring"][1] - _allreduce(ranks, size)["ring"][1]
        return Link(hop_s, (longest - seconds) / bytes_more)
    for size, seconds in points[1:]:
        if size < _LARGE * points[-1][0]:  # of those, latency and what a link lets pass at once are the most
            continue
        rest = seconds - points[0][1]
        _, crossing, _ = _allreduce(ranks, size)["ring"]
        numerator += crossing * rest / seconds**2
        denominator += crossing**2 / seconds**2
    return Link(hop_s, max(numerator / denominator, 1e-13)) if denominator else None


def of_bandwidth(link: Link, gbit: float) -> Link:
    """The same between hosts that are joined by so many Gbit/s."""
    return Link(link.hop_s, 8e-9 / (gbit * ETHERNET), link.cpu_s_per_byte)


def _allreduce(ranks: Ranks, nbytes: float) -> dict[str, tuple[float, float, float]]:
    """Hops, bytes that leave a host, and bytes that a rank sends, by algorithm."""
    n, hosts = ranks.size, ranks.hosts
    ring = 2 * (n - 1) / n * nbytes
    across = rounds(hosts) * ranks.per_host if hosts > 1 else rounds(n)
    return {
        "ring": (2 * (n - 1), ring, ring),
        "tree": (rounds(n), across * nbytes, rounds(n) * nbytes),
    }


def _others(ranks: Ranks, kind: str, nbytes: float) -> tuple[float, float, float]:
    n, here = ranks.size, ranks.per_host
    if kind == "allgather":
        return n - 1, (n - 1) * nbytes, (n - 1) * nbytes
    assert kind == "alltoall", kind
    sent = nbytes * (n - 1) / n
    return n - 1, (here * nbytes * (n - here) / n if ranks.hosts > 1 else sent), sent
