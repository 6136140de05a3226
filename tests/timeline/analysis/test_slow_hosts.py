"""Which hosts and devices slowed jobs: over starts and runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hvdtrain.timeline.analysis.slow_hosts import slow_hosts
from hvdtrain.timeline.columns import StepTable
from tests.support.step_tables import noise, table_of


def _start(seed: int, late: dict[int, float], hosts: list[str], steps: int = 200) -> StepTable:
    work = 100 + noise(np.random.default_rng(seed), (len(hosts), steps), "gaussian", 1.0)
    for rank, ms in late.items():
        work[rank] += ms
    return replace(table_of(work), hosts=hosts, devices=[f"GPU-{host}" for host in hosts])


def test_hosts_are_kept_over_starts_in_which_ranks_move() -> None:
    starts = [
        _start(0, {2: 20.0}, ["a", "b", "c", "d"]),
        _start(1, {0: 20.0}, ["c", "a", "b", "d"]),
        _start(2, {}, ["a", "b", "d", "e"]),
        _start(3, {3: 10.0}, ["a", "b", "c", "d"]),
        _start(4, {0: 50.0}, ["a", "b"], steps=5),  # too short to judge
    ]
    found = slow_hosts([(start, []) for start in starts], {"c": "rack 1", "d": "rack 1", "a": "rack 2"})
    first, second = found.hosts[:2]
    assert (first.name, first.slow_starts, first.starts) == ("c", 2, 3)
    assert first.device_hours == pytest.approx(2 * 0.9 * 0.02 * 200 * 4 / 3600, rel=0.2)
    assert (second.name, second.slow_starts, second.starts) == ("d", 1, 4)
    assert [place.name for place in found.hosts[2:]] == ["a", "b", "e"]
    assert [place.name for place in found.devices[:2]] == ["GPU-c", "GPU-d"] and found.devices[0].host == "c"
    assert [(place.name, place.slow_starts) for place in found.groups] == [("rack 1", 3), ("rack 2", 0)]
    assert first.causes.most_common(1)[0][0] in ("forward", "backward")


@pytest.mark.parametrize("balanced", [False, True])
def test_a_host_with_fewer_micro_batches_is_judged_by_what_is_left(balanced: bool) -> None:
    """It was slow until step 100; since then it has half of the micro-batches, and is later by less than one."""
    work = 100 + noise(np.random.default_rng(0), (4, 200), "gaussian", 1.0)
    work[2, :100] += 100.0
    work[2, 100:] += 5.0
    table = replace(table_of(work), hosts=["a", "b", "c", "d"])
    event = {"event": "shares", "at_step": 100, "shares": [2, 2, 1, 2], "pass_s": [0.05, 0.05, 0.1, 0.05]}
    (first, *_) = slow_hosts([(table, [event] if balanced else [])], {}).hosts
    assert (first.slow_starts, first.name) == ((0, "a") if balanced else (1, "c"))
