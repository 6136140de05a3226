"""Which ranks are measured together, for how long, and what is found, by ranks that are threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.comm import link_probe
from hvdtrain.comm.solo import SoloComm
from tests.support.thread_comm import ThreadComm, on_ranks

CPU = torch.device("cpu")


@given(st.integers(2, 30))
def test_every_host_meets_both_neighbours_and_never_two_at_once(count: int) -> None:
    rounds = link_probe.neighbour_rounds(count)
    for pairs in rounds:
        hosts = [host for pair in pairs for host in pair]
        assert len(hosts) == len(set(hosts))
    met = {frozenset(pair) for pairs in rounds for pair in pairs}
    assert met == {frozenset((host, (host + 1) % count)) for host in range(count)}
    assert len(rounds) <= 3


def test_the_bus_bandwidth_is_that_of_nccl_tests() -> None:
    assert link_probe.bus_bandwidth(8_000_000, 0.5, 2) == 16e6
    assert link_probe.bus_bandwidth(8_000_000, 0.5, 4) == 24e6


def test_a_host_between_two_slow_ones_gets_another_chance() -> None:
    speeds = dict(zip("abcdefg", (9.0, 9.0, 1.0, 1.5, 2.0, 9.0, 8.0), strict=True))
    assert link_probe.retried_pairs(speeds, 0.5) == [("c", "a"), ("d", "b"), ("e", "f")]
    assert link_probe.retried_pairs(dict.fromkeys("abc", 1.0), 0.5) == []


@pytest.mark.parametrize("hosts", ["aabb", "aab", "abc", "abcde", "aaa", "a"])
def test_all_ranks_find_the_same_speeds(hosts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_probe, "HOST_SIZES", (1 << 10, 1 << 12, 1 << 14))
    found = on_ranks(len(hosts), lambda comm: link_probe.measure_hosts(comm, CPU, list(hosts), 1e9, 0.5))
    assert all(speeds == found[0] for speeds in found)
    assert set(found[0].inside) == {host for host in hosts if hosts.count(host) > 1}
    assert set(found[0].between) == (set(hosts) if len(set(hosts)) > 1 else set())
    assert (found[0].everyone is None) == (len(hosts) == 1)


def _measures(monkeypatch: pytest.MonkeyPatch, slow: int) -> list[list[list[int]]]:
    """Groups with rank `slow` are found slow; return the groups that are measured together."""
    measured: list[list[list[int]]] = []

    def measure(comm: object, device: object, groups: list[list[int]], budget_s: float) -> list[Any]:
        measured.append(groups)
        return [(group, 1.0 if slow in group else 9.0) for group in groups]

    monkeypatch.setattr(link_probe, "_measure", measure)
    return measured


@pytest.mark.parametrize("hosts", ["abc", "abcd", "abcdefg"])
def test_a_slow_neighbour_does_not_count(hosts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _measures(monkeypatch, slow=1)
    (found,) = on_ranks(1, lambda comm: link_probe.measure_hosts(comm, CPU, list(hosts), 1.0, 0.5))
    assert found.between == {host: 1.0 if host == "b" else 9.0 for host in hosts}


def test_all_ranks_end_where_rank_0_does() -> None:
    def body(comm: ThreadComm) -> list[int]:
        return [size for size, _ in link_probe.probe_link(comm, CPU, 0.0 if comm.rank == 0 else 1e9)]

    assert on_ranks(3, body) == [list(link_probe.SIZES[:2])] * 3


def test_of_large_sizes_the_mean_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that passes something at once is fast at first."""
    for size, expected in ((1 << 10, 1.0), (1 << 22, 2.0)):
        times = iter([0.0, 9.0, 10.0, 11.0, 20.0, 23.0])
        monkeypatch.setattr(link_probe, "clock_s", lambda device, times=times: next(times))
        assert link_probe._allreduce_s(SoloComm(), SoloComm(), CPU, size) == expected
