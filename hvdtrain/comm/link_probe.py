"""Measure the times of allreduces by size: among all ranks, within each host, and between neighbouring hosts."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from hvdtrain.comm.base import Comm, GroupingComm
from hvdtrain.comm.objects import allgather_json
from hvdtrain.comm.solo import SoloComm

SIZES = tuple(1 << exponent for exponent in (10, 12, 14, 16, 18, 20, 22, 23, 24, 25, 26))
"""Bytes: 1 KiB to 4 MiB in factors of four, then up to 64 MiB. A link may pass some MiB at once, which do not show its
bandwidth; larger sizes do."""

_LARGE = 1 << 22
"""Bytes from which the mean counts: the first of several allreduces may use up what a link passes at once."""

MEASURED = "link/bytes/"  # beginning of the names of the allreduces that are measured

_TIMES = 2

HOST_SIZES = tuple(1 << exponent for exponent in range(16, 29, 2))  # bytes: 64 KiB to 256 MiB in factors of four

Group = list[int]

_PART = 0.8  # of the time limit that is spent in allreduces; the rest is for making communicators


def probe_link(
    comm: Comm, device: torch.device, budget_s: float, *, among: Comm | None = None, sizes: Sequence[int] = SIZES
) -> list[tuple[int, float]]:
    """Return bytes and seconds of allreduces of growing sizes, as this rank measures them. Collective: yes.

    Ends before the size that would exceed `budget_s` by rank 0's clock, but always measures the two smallest sizes.

    `comm`: ranks that begin each allreduce together. `among`: the ranks of each, a subset with this one (default: all).
    """
    found: list[tuple[int, float]] = []
    slowest: list[tuple[int, float]] = []
    began_s = time.perf_counter()
    for size in sizes:
        if len(found) >= 2:
            (before, fast_s), (last, slow_s) = slowest[-2:]
            expected_s = slow_s + max(0.0, slow_s - fast_s) * (size - last) / (last - before)
            over = time.perf_counter() - began_s + (_TIMES + 1) * expected_s > budget_s
            if float(comm.broadcast(torch.tensor([float(over)]), name="link/ends").wait()):
                break
        seconds = _allreduce_s(comm, comm if among is None else among, device, size)
        found.append((size, seconds))
        if among is not None:  # other subsets may be slower
            seconds = float(comm.allgather(torch.tensor([seconds]), name="link/slowest").wait().max())
        slowest.append((size, seconds))
    return found


def _allreduce_s(comm: Comm, among: Comm, device: torch.device, size: int) -> float:
    """Return the time of an allreduce of fp32 numbers, after one that is not counted. Collective: yes.

    It is the minimum of several ones; their mean for large sizes.
    """
    tensor, number = torch.zeros(size // 4, device=device), torch.zeros(1)
    seconds = []
    for _ in range(_TIMES + 1):
        # Lines the ranks up. Not a barrier: after one, Horovod's Timeline is incomplete.
        comm.allreduce(number, name="link/together").wait()
        start_s = clock_s(device)
        among.allreduce(tensor, name=f"{MEASURED}{size}").wait()
        seconds.append(clock_s(device) - start_s)
    return sum(seconds[1:]) / _TIMES if size >= _LARGE else min(seconds[1:])


def clock_s(device: torch.device) -> float:
    """Return the time in seconds when the device has finished all work given to it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@dataclass(frozen=True)
class HostSpeeds:
    """Bus bandwidths in bytes per second."""

    inside: dict[str, float]  # of each host that has several ranks
    between: dict[str, float]  # of each host with another one, the fastest
    everyone: float | None  # of all ranks together; None with one rank


def bus_bandwidth(size_bytes: int, seconds: float, ranks: int) -> float:
    """Return the bus bandwidth of an allreduce in bytes per second: what its slowest link carried, whatever `ranks`.

    Defined by nccl-tests: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    return 2 * (ranks - 1) / ranks * size_bytes / seconds


def neighbour_rounds(count: int) -> list[list[tuple[int, int]]]:
    """Return the pairs of neighbours in a ring of `count` hosts, in rounds where no host occurs twice. Pure."""
    if count < 3:
        return [[(0, 1)]] if count == 2 else []
    ring = [(host, (host + 1) % count) for host in range(count)]
    even = count - count % 2
    rounds = [ring[0:even:2], ring[1:even:2], ring[even:]]
    return [pairs for pairs in rounds if pairs]


def retried_pairs(between: dict[str, float], least: float) -> list[tuple[str, str]]:
    """Pair each host that is slow with both neighbours with a fast one; the neighbours may be the slow ones. Pure."""
    best = sorted(between, key=lambda host: between[host], reverse=True)
    usual = median(between.values())
    slow = [host for host in reversed(best) if between[host] < least * usual]
    return list(zip(slow, best[: len(best) - len(slow)], strict=False))


def measure_hosts(comm: Comm, device: torch.device, hosts: Sequence[str], seconds: float, least: float) -> HostSpeeds:
    """Measure for about `seconds`; each rank returns the same. Collective: yes.

    `hosts`: of each rank. `least`: a host below this part of the median is measured again, with another one.
    """
    ranks: dict[str, Group] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    names = list(ranks)
    rounds = neighbour_rounds(len(names))
    part_s = _PART * seconds / (3 + len(rounds))
    inside = {hosts[group[0]]: speed for group, speed in _measure(comm, device, ranks.values(), part_s)}
    between: dict[str, float] = {}

    def measure_pairs(pairs: Sequence[tuple[str, str]]) -> None:
        for group, speed in _measure(comm, device, [sorted(ranks[a] + ranks[b]) for a, b in pairs], part_s):
            for host in dict.fromkeys(hosts[rank] for rank in group):  # not a set: its order differs by rank
                between[host] = max(between.get(host, 0.0), speed)

    for pairs in rounds:
        measure_pairs([(names[a], names[b]) for a, b in pairs])
    if len(names) > 2:
        measure_pairs(retried_pairs(between, least))
    everyone = [speed for _, speed in _measure(comm, device, [list(range(comm.size))], part_s)]
    return HostSpeeds(inside, between, everyone[0] if everyone else None)


def _measure(comm: Comm, device: torch.device, among: Iterable[Group], budget_s: float) -> list[tuple[Group, float]]:
    """Return the bus bandwidth of each group of several ranks, all measured at the same time. Collective: yes.

    It is that of the size with the highest bandwidth, by the slowest rank's clock.
    """
    groups = [group for group in among if len(group) > 1]
    if not groups:
        return []
    if isinstance(comm, GroupingComm):
        comm.add_groups([group for group in groups if len(group) < comm.size])
    mine = next((group for group in groups if comm.rank in group), [])
    own = comm if len(mine) == comm.size else comm.subset(mine, 0, 1) if mine else SoloComm()
    found = probe_link(comm, device, budget_s, among=own, sizes=HOST_SIZES)
    everyone = allgather_json(comm, found, name="link/found")
    speeds = []
    for group in groups:
        slowest = [(size, max(everyone[rank][row][1] for rank in group)) for row, (size, _) in enumerate(found)]
        speeds.append((group, max(bus_bandwidth(size, seconds, len(group)) for size, seconds in slowest)))
    return speeds
