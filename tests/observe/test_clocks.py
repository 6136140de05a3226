"""Clocks of ranks with known offsets, compared by collectives with simulated delays."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvdtrain.observe.clocks import EVERY_US, Clocks
from tests.support.thread_comm import ThreadComm, on_ranks

HOUR_US = 3.6e9
OFFSETS_US = [0.0, 0.0, 7e9, -3e12]
DRIFTS = [0.0, 0.0, 40e-6, -90e-6]
IDS = ["a", "a", "b", "c"]


SOLO: Any = SimpleNamespace(rank=0, size=4)
"""What `Clocks` asks of the ranks when it is told bounds from elsewhere."""


def own_us(rank: int, true_us: float) -> float:
    """What a rank's clock says at a moment of rank 0's."""
    return (true_us - OFFSETS_US[rank] + DRIFTS[rank] * HOUR_US) / (1 + DRIFTS[rank])


def collective(rng: random.Random, true_us: float, late: int) -> tuple[list[float], list[float]]:
    """Own times at which each rank began and finished one; `late` began last."""
    began = [true_us + (500 if rank == late else rng.random() * 400) for rank in range(4)]
    over = max(began)
    finished = [over + 80 + rng.expovariate(1 / 100) for _ in range(4)]
    return tuple([own_us(r, us) for r, us in enumerate(moments)] for moments in (began, finished))  # type: ignore[return-value]


def test_planted_offsets_and_drifts_are_within_the_stated_error() -> None:
    rng = random.Random(0)
    clocks = Clocks(SOLO, IDS)
    worst = []
    for block in range(200):
        true_us = HOUR_US + 1e6 * block
        steps = [collective(rng, true_us + 1e5 * n, late=rng.randrange(4)) for n in range(8)]
        sent, received = (np.array([step[n] for step in steps]).T for n in range(2))
        clocks.add_bounds(sent, received)
        if block > 20:
            for rank in range(4):
                mine_us = own_us(rank, true_us)
                found = clocks.offset(rank, mine_us)
                assert abs(mine_us + found.us - true_us) <= found.error_us + 0.01
                worst.append(found.error_us)
                assert (found.error_us == 0) == (IDS[rank] == "a")
    assert max(worst) < 200


def test_ranks_of_one_clock_need_no_probes() -> None:
    def body(comm: ThreadComm) -> tuple[bool, bool]:
        clocks = Clocks(comm, ["x"] * comm.size, pause=pytest.fail)
        clocks.probe(3)
        return clocks.shared, clocks.due

    assert on_ranks(2, body) == [(True, False)] * 2


def test_probes_bound_the_clocks_of_other_hosts() -> None:
    """Threads share a clock in truth, of a microsecond a look: what is found is within the error of nothing."""
    looks = itertools.count()

    def body(comm: ThreadComm) -> object:
        clocks = Clocks(comm, ["x", "y", "y"], lambda: 1000 * next(looks), lambda seconds: None)
        assert clocks.due
        clocks.probe(20)
        assert not clocks.due
        return clocks.offset(1, 0.0) if comm.rank else [clocks.offset(rank, clocks.now_ns() / 1e3) for rank in range(3)]

    same, *others = on_ranks(3, body)[0]  # type: ignore[misc]
    assert same == (0.0, 0.0)
    for us, error_us in others:
        assert abs(us) <= error_us < 300


def test_more_are_due_after_a_while() -> None:
    now = [10**15]
    clocks = Clocks(SOLO, IDS, now_ns=lambda: now[0])
    assert clocks.due
    clocks._probed_us = now[0] / 1e3
    assert not clocks.due
    now[0] += round(EVERY_US * 1e3)
    assert clocks.due


def test_unknown_times_bound_nothing() -> None:
    clocks = Clocks(SOLO, IDS)
    for _ in range(2):
        assert clocks.offset(2, 5.0).error_us == float("inf")
        clocks.add_bounds(np.full((4, 3), np.nan), np.full((4, 3), np.nan))
