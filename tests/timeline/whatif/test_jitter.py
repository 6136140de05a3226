"""The expected maximum over ranks."""

from __future__ import annotations

import numpy as np
import pytest

from hvdtrain.timeline.whatif.jitter import Jitter


def _normal(ranks: int, steps: int) -> Jitter:
    return Jitter.from_times(1 + 0.01 * np.random.default_rng(0).standard_normal((ranks, steps)))


def test_one_rank_or_equal_ranks_wait_for_none() -> None:
    assert _normal(4, 50).expected_maximum_s(1) == 0
    assert Jitter.from_times(np.ones((4, 50))).expected_maximum_s(4096) == 0
    assert Jitter.from_times(np.empty((2, 0))).expected_maximum_s(8) == 0


@pytest.mark.parametrize(("ranks", "expected"), [(2, 0.564), (10, 1.539), (100, 2.508)])
def test_of_a_normal_distribution_it_is_what_the_tables_say(ranks: int, expected: float) -> None:
    found = _normal(8, 2000).expected_maximum_s(ranks)
    assert found == pytest.approx(0.01 * expected, rel=0.08)


def test_of_two_ranks_it_is_what_they_really_waited() -> None:
    compute_s = 1 + 0.01 * np.random.default_rng(1).standard_normal((2, 4000))
    waited = float((compute_s.max(axis=0) - compute_s.mean(axis=0)).mean())
    assert Jitter.from_times(compute_s).expected_maximum_s(2) == pytest.approx(waited, rel=0.05)


def test_delays_common_to_all_ranks_cause_no_waiting() -> None:
    common = np.linspace(0, 5, 200)
    own = 0.01 * np.random.default_rng(2).standard_normal((4, 200))
    with_common, without = (Jitter.from_times(values).expected_maximum_s(4) for values in (own + common, own))
    assert with_common == pytest.approx(without)
    assert Jitter.from_times(common[None]).expected_maximum_s(64) < 0.2, "nor what lasts, of one rank alone"


def test_it_grows_with_ranks_beyond_the_measured_number() -> None:
    jitter = _normal(2, 30)
    found = [jitter.expected_maximum_s(n) for n in (2, 8, 64, 512, 4096)]
    assert found == sorted(found)
    assert found[-1] > jitter.deviations[-1], "later than any that was seen"
    assert jitter.reaches(60)
    assert not jitter.reaches(64)
