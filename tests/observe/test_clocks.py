"""Clocks of ranks with known offsets, compared by collectives with simulated delays.

A planted offset and drift are within the stated error, whatever the delays of what bounds them.
"""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hvdtrain.observe.clocks import EVERY_US, KEPT, MAX_DRIFT, ClockFit, Clocks, offset_at
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


def test_of_ranks_with_one_clock_the_last_to_send_and_the_first_to_receive_bound_it() -> None:
    clocks = Clocks(SOLO, ["a", "a", "b", "b"])
    clocks.add_bounds(np.array([[0.0, 390.0, 100.0, 400.0]]).T, np.array([[460.0, 450.0, 420.0, 600.0]]).T)
    assert clocks.offset(3, 400.0) == pytest.approx(((50 - 30) / 2, (50 + 30) / 2), abs=0.1)


def test_unknown_times_bound_nothing() -> None:
    clocks = Clocks(SOLO, IDS)
    for _ in range(2):
        assert clocks.offset(2, 5.0).error_us == float("inf")
        clocks.add_bounds(np.full((4, 3), np.nan), np.full((4, 3), np.nan))


def planted(offset_us: float, drift: float, at_us: float) -> float:
    """The offset at a time of the other clock."""
    return offset_us + drift * (at_us - HOUR_US)


@settings(max_examples=60, deadline=None)
@example(2199023255553.0, -7.346915186384146e-05, [(False, 495.0, 0.0), (True, 0.0, 0.0)], 154193.0)
@given(
    offset_us=st.floats(-1e13, 1e13),
    drift=st.floats(-MAX_DRIFT, MAX_DRIFT),
    bounds=st.lists(
        st.tuples(st.booleans(), st.floats(0, 6e8), st.one_of(st.just(0.0), st.floats(0, 1e6))),
        min_size=1,
        max_size=200,
    ),
    ahead_us=st.floats(-1e8, 1e9),
)
def test_the_truth_is_always_inside(
    offset_us: float, drift: float, bounds: list[tuple[bool, float, float]], ahead_us: float
) -> None:
    fit = ClockFit()
    times = [HOUR_US, HOUR_US]
    for is_upper, after_us, delay_us in sorted(bounds, key=lambda bound: bound[1]):
        time_us = HOUR_US + after_us
        times[is_upper] = time_us
        truth = planted(offset_us, drift, time_us)
        delay_us += 2 * float(np.spacing(abs(truth) + delay_us))  # what is rounded is a bound of the truth still
        fit.add(-1.0 if is_upper else 1.0, time_us, truth + (delay_us if is_upper else -delay_us))
    at_us = max(times) + ahead_us
    found = fit.at(at_us)
    both = len({is_upper for is_upper, _, _ in bounds}) == 2
    assert (found is not None) == both
    if found is not None:
        # What a double of 1e13 cannot tell apart comes on top.
        assert abs(found.us - planted(offset_us, drift, at_us)) <= found.error_us + 0.05 + 1e-3 * found.error_us


def test_an_old_bound_holds_less_the_longer_it_is_ago() -> None:
    fit = ClockFit()
    fit.add(1.0, HOUR_US, -10.0)
    fit.add(-1.0, HOUR_US, 10.0)
    (now, later) = (fit.at(HOUR_US), fit.at(HOUR_US + 1e6))
    assert now is not None and later is not None
    assert offset_at(0.0, np.array([[0.0, 1.0]]), np.array([[0.0, -1.0]])) is None, "bounds of no line"
    assert now.error_us == pytest.approx(10, abs=0.1)
    assert later.error_us == pytest.approx(10 + MAX_DRIFT * 1e6, abs=0.1)


def test_a_clock_that_is_set_right_is_found_again() -> None:
    fit = ClockFit()
    for number in range(50):
        truth = 0.0 if number < 25 else 10_000.0  # more than any drift
        fit.add(1.0, HOUR_US + 1e6 * number, truth - 100)
        fit.add(-1.0, HOUR_US + 1e6 * number, truth + 100)
    found = fit.at(HOUR_US + 5e7)
    assert found is not None and abs(found.us - 10_000) <= found.error_us < 500


def test_what_is_kept_is_bounded_and_is_what_bounds_best() -> None:
    fit, rng = ClockFit(), random.Random(1)
    for number in range(5000):
        fit.add(-1.0, HOUR_US + 1e4 * number, rng.expovariate(1 / 500))
        fit.add(1.0, HOUR_US + 1e4 * number, -rng.expovariate(1 / 500))
        if number > 4000 and number % 50 == 0:
            found = fit.at(HOUR_US + 1e4 * number)
            assert found is not None and abs(found.us) <= found.error_us < 2
    assert len(fit._upper) <= KEPT
