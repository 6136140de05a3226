"""The duration of a collective from latency and bandwidth, by algorithm, number of ranks and number of hosts. Pure.

Hockney's model ("The Communication Challenge for MPP", 1994), with the costs of a ring and of recursive doubling from
Thakur, Rabenseifner and Gropp ("Optimization of Collective Communication Operations in MPICH", 2005), and those of
NCCL's double binary tree from Sanders, Speck and Träff ("Two-tree algorithms for full bandwidth broadcast, reduction
and scan", 2009). A ring through several hosts waits for the slowest message of each round, which crosses the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hvdtrain.plan.plan import Ranks

Algorithm = Literal["auto", "ring", "tree", "double_tree"]

_NEGOTIATION = 2
"""Reductions of a few bytes with which Horovod's ranks agree that a (cached) tensor is ready on all of them."""
_LARGE = 0.1
"""A size above this share of the largest measured one is large."""
_APART = 2
"""Two sizes are far apart if they differ by this factor."""
ETHERNET = 0.94
"""The share of a link's bandwidth that carries payload: 1448 bytes of each TCP packet over Ethernet, which takes 1538
bytes with headers, preamble and gap. Allreduces of 1 to 8 MB between two hosts got 0.94 to 0.955 of 0.1 to 1 Gbit/s, on
a link that counts neither preamble nor gap."""


@dataclass(frozen=True)
class Link:
    """The link between ranks."""

    hop_s: float  # time of an empty message from one rank to another
    s_per_byte: float  # seconds per byte that leaves a host, or a rank if there is one host
    cpu_s_per_byte: float = 0.0  # processor time of the exchanging thread per byte that its rank sends
    by_nccl: bool = False  # whether NCCL exchanges, which also knows the double tree

    def hops_s(self, ranks: Ranks, across: float, inside: float) -> float:
        """Return the seconds of consecutive empty messages across hosts and inside one."""
        return across * self.hop_s + inside * (min(self.hop_s, ONE_HOST.hop_s) if ranks.hosts > 1 else self.hop_s)


ONE_HOST = Link(2e-5, 2.5e-10, 2.5e-10)
"""Between ranks of one host, if nothing was measured: 4 GB/s through memory, which a core copies."""


def tree_rounds(count: int) -> int:
    """Return the rounds of a tree over `count` ranks."""
    return max(0, (count - 1).bit_length())


def collective_s(
    link: Link, ranks: Ranks, kind: str, nbytes: float, algorithm: Algorithm = "auto"
) -> tuple[float, float]:
    """Return the seconds of a collective after all ranks are ready, and processor seconds of the exchanging thread.

    `kind` is allreduce, reducescatter, allgather or alltoall; `nbytes` is what each rank hands over. The algorithm is
    that of an allreduce; auto uses the fastest of those that MPI or NCCL use by themselves.
    """
    if ranks.size < 2:
        return 0.0, 0.0
    costs = _allreduce(ranks, nbytes) if kind == "allreduce" else {"ring": _other_collective(ranks, kind, nbytes)}
    names = ("ring", "tree", "double_tree") if link.by_nccl else ("ring", "tree")
    used = [costs[algorithm]] if algorithm in costs else [costs[name] for name in names if name in costs]
    negotiation_s = _NEGOTIATION * link.hops_s(ranks, *_rounds(ranks))
    found = []
    for across, inside, crossing, sent in used:
        cpu_s = sent * link.cpu_s_per_byte
        hops_s = link.hops_s(ranks, across, inside)
        found.append((negotiation_s + hops_s + max(crossing * link.s_per_byte, cpu_s), cpu_s))
    return min(found)


def fit_allreduces(pairs: Sequence[tuple[int, float]], ranks: Ranks) -> Link | None:
    """Return the link that explains allreduces of these bytes and seconds; None if there are too few sizes.

    The smallest size gives the latency. The others give the bandwidth, by least squares of relative errors. Between
    hosts, the two largest sizes give the bandwidth if they are far apart: their difference leaves out the burst that
    a link may pass at once.
    """
    points = sorted((size, seconds) for size, seconds in pairs if seconds > 0)
    if len(points) < 2 or points[0][0] == points[-1][0] or ranks.size < 2:
        return None
    across, inside = _rounds(ranks)
    of_one_s = points[0][1] / (_NEGOTIATION + 1)
    inside_s = inside * ONE_HOST.hop_s if ranks.hosts > 1 else 0.0
    hop_s = max((of_one_s - inside_s) / across, of_one_s / (across + inside)) if across else of_one_s / inside
    numerator = denominator = 0.0
    (size, seconds), (largest, longest) = points[-2:]
    if ranks.hosts > 1 and size * _APART <= largest and seconds < longest:
        bytes_more = _allreduce(ranks, largest)["ring"][2] - _allreduce(ranks, size)["ring"][2]
        return Link(hop_s, (longest - seconds) / bytes_more)
    for size, seconds in points[1:]:
        if size < _LARGE * points[-1][0]:  # mostly latency and burst
            continue
        rest = seconds - points[0][1]
        crossing = _allreduce(ranks, size)["ring"][2]
        numerator += crossing * rest / seconds**2
        denominator += crossing**2 / seconds**2
    return Link(hop_s, max(numerator / denominator, 1e-13)) if denominator else None


def with_bandwidth(link: Link, gbit: float) -> Link:
    """Return the link with a bandwidth of `gbit` Gbit/s between hosts."""
    return Link(link.hop_s, 8e-9 / (gbit * ETHERNET), link.cpu_s_per_byte)


_Cost = tuple[float, float, float, float]
"""Messages across hosts and inside one that follow each other, bytes that leave a host, bytes that a rank sends."""


def _rounds(ranks: Ranks) -> tuple[int, int]:
    """Return the rounds of a tree over all ranks: those across hosts, and those inside one."""
    across = tree_rounds(ranks.hosts)
    return across, tree_rounds(ranks.size) - across


def _allreduce(ranks: Ranks, nbytes: float) -> dict[str, _Cost]:
    n, hosts, local = ranks.size, ranks.hosts, ranks.per_host
    ring = 2 * (n - 1) / n * nbytes
    leaves = 2 * (hosts - 1) / hosts * nbytes if hosts > 1 else ring
    crossing = tree_rounds(hosts) * local if hosts > 1 else tree_rounds(n)
    rounds = _rounds(ranks)
    return {
        "ring": (*_hops(ranks, 2 * (n - 1)), ring, ring),
        "tree": (*rounds, crossing * nbytes, tree_rounds(n) * nbytes),
        "double_tree": (2 * rounds[0], 2 * (rounds[1] if hosts == 1 else local - 1), leaves, ring),
    }


def _hops(ranks: Ranks, count: float) -> tuple[float, float]:
    """Return the messages of rounds that each wait for one across the network, if there is one."""
    return (count, 0.0) if ranks.hosts > 1 else (0.0, count)


def _other_collective(ranks: Ranks, kind: str, nbytes: float) -> _Cost:
    n, local = ranks.size, ranks.per_host
    hops = _hops(ranks, n - 1)
    if kind == "allgather":
        return (*hops, (n - 1) * nbytes, (n - 1) * nbytes)
    if kind == "reducescatter":  # the first half of a ring's allreduce
        return (*hops, nbytes * (n - 1) / n, nbytes * (n - 1) / n)
    assert kind == "alltoall", kind
    sent = nbytes * (n - 1) / n
    return (*hops, (local * nbytes * (n - local) / n if ranks.hosts > 1 else sent), sent)
