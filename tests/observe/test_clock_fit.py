"""A planted offset and drift are within the stated error, whatever the delays of what bounds them."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hvdtrain.observe.clock_fit import KEPT, MAX_DRIFT, ClockFit, offset_at

HOUR_US = 3.6e9


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
        (fit.at_most if is_upper else fit.at_least)(time_us, truth + (delay_us if is_upper else -delay_us))
    at_us = max(times) + ahead_us
    found = fit.at(at_us)
    both = len({is_upper for is_upper, _, _ in bounds}) == 2
    assert (found is not None) == both
    if found is not None:
        # What a double of 1e13 cannot tell apart comes on top.
        assert abs(found.us - planted(offset_us, drift, at_us)) <= found.error_us + 0.05 + 1e-3 * found.error_us


def test_an_old_bound_holds_less_the_longer_it_is_ago() -> None:
    fit = ClockFit()
    fit.at_least(HOUR_US, -10.0)
    fit.at_most(HOUR_US, 10.0)
    (now, later) = (fit.at(HOUR_US), fit.at(HOUR_US + 1e6))
    assert now is not None and later is not None
    assert offset_at(0.0, np.array([[0.0, 1.0]]), np.array([[0.0, -1.0]])) is None, "bounds of no line"
    assert now.error_us == pytest.approx(10, abs=0.1)
    assert later.error_us == pytest.approx(10 + MAX_DRIFT * 1e6, abs=0.1)


def test_a_clock_that_is_set_right_is_found_again() -> None:
    fit = ClockFit()
    for number in range(50):
        truth = 0.0 if number < 25 else 10_000.0  # more than any drift
        fit.at_least(HOUR_US + 1e6 * number, truth - 100)
        fit.at_most(HOUR_US + 1e6 * number, truth + 100)
    found = fit.at(HOUR_US + 5e7)
    assert found is not None and abs(found.us - 10_000) <= found.error_us < 500


def test_what_is_kept_is_bounded() -> None:
    fit = ClockFit()
    rng = random.Random(1)
    for number in range(5000):
        fit.at_most(HOUR_US + 1e4 * number, rng.expovariate(1 / 500))
    assert len(fit._upper) <= KEPT
