"""Simulated stragglers: which rank is named, at what cost, and that none is named where there is only noise."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.timeline.analysis.lateness import costs, like_the_others, median_of_others, order_of
from hvdtrain.timeline.analysis.rank_steps import Rounds, from_stamps
from hvdtrain.timeline.analysis.shares import passes_by_rank, without_passes
from hvdtrain.timeline.analysis.stragglers import find_stragglers
from tests.support.step_tables import Floats, noise, table_of

STEP_MS = 20.0
KINDS = ("gaussian", "heavy", "lasting")


def _rounds(work: Floats, error_ms: float = 0.0) -> Rounds:
    ranks, steps = work.shape
    errors, step = np.where(np.arange(ranks) > 0, error_ms, 0.0), np.arange(steps, dtype=np.int32)
    hosts = [f"host{i}" for i in range(ranks)]
    ones, far = np.ones(steps, np.int32), np.full_like(work, np.inf)
    return Rounds(
        "stamps", hosts, work, step, step, np.ones(steps), float(np.median(work)), errors, ones, far, work[:0, None]
    )


def _quiet(seed: int, ranks: int, steps: int, kind: str, scale: float) -> Floats:
    """What varies for all ranks alike, and each rank's own noise."""
    generator = np.random.default_rng(seed)
    alike = STEP_MS + generator.normal(0, 1, steps)
    return alike + noise(generator, (ranks, steps), kind, scale)


def _planted(quiet: Floats, rank: int, ms: float) -> tuple[Floats, float]:
    late = quiet.copy()
    late[rank] += ms
    return late, float((late.max(axis=0) - quiet.max(axis=0)).mean())


@pytest.mark.parametrize(
    ("kind", "steps", "noise_share"),
    [("gaussian", 150, 0.03), ("heavy", 150, 0.03), ("lasting", 600, 0.03), ("heavy", 20, 0.005)],
)
@pytest.mark.parametrize("ranks", [2, 4, 16, 32])
@pytest.mark.some(6)
def test_a_rank_that_is_late_by_a_tenth_is_named_with_what_it_costs(
    ranks: int, kind: str, steps: int, noise_share: float
) -> None:
    for seed in range(4):
        late = seed % ranks
        work, cost = _planted(_quiet(seed, ranks, steps, kind, noise_share * STEP_MS), late, 0.1 * STEP_MS)
        found = find_stragglers(_rounds(work))
        assert found.late == [late], (seed, found.reason)
        assert found.cost_ms[late].value == pytest.approx(cost, rel=0.2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ranks", "steps", "late"), [(2, 20, 0), (4, 30, 0), (4, 30, 1), (16, 40, 0), (16, 40, 5)])
@pytest.mark.some(5)
def test_noise_names_no_rank_beside_those_that_are_late(ranks: int, steps: int, late: int, kind: str) -> None:
    named = 0
    for seed in range(50):
        work = _quiet(seed, ranks, steps, kind, 0.1 * STEP_MS)
        work[:late] += STEP_MS
        named += bool(set(find_stragglers(_rounds(work)).late) - set(range(late)))
    assert named <= 1


def test_intervals_hold_the_cost_about_as_often_as_they_say() -> None:
    """The cost over many steps, while each run has few."""
    _, cost = _planted(_quiet(1, 4, 100_000, "gaussian", 1.0), 2, 2.0)
    runs = [_planted(_quiet(seed, 4, 80, "gaussian", 1.0), 2, 2.0)[0] for seed in range(60)]
    found = [find_stragglers(_rounds(work)).cost_ms[2] for work in runs]
    assert 0.88 <= np.mean([each.low <= cost <= each.high for each in found]) < 1.0


@pytest.mark.parametrize(("ms", "every"), [(3.0, 4), (5000.0, 40)])
def test_ranks_that_are_late_by_turns_are_jitter_even_if_they_pause(ms: float, every: int) -> None:
    work = _quiet(0, 32, 400, "gaussian", 0.1)
    for rank in range(32):
        work[rank, rank % every :: every] += ms
    found = find_stragglers(_rounds(work))
    assert not found.late and not found.pauses
    assert found.jitter_ms.value == pytest.approx(ms * min(1.0, 32 / every), rel=0.1)


def test_one_pause_is_reported_alone_and_not_as_a_mean() -> None:
    work, cost = _planted(_quiet(0, 4, 200, "gaussian", 0.2), 2, 2.0)
    work[1, 77] += 10_000.0
    found = find_stragglers(_rounds(work))
    assert [(pause.rank, pause.step) for pause in found.pauses] == [(1, 77)]
    assert found.pauses[0].ms == pytest.approx(10_000, rel=0.01)
    assert found.late == [2]
    assert found.cost_ms[2].value == pytest.approx(cost, rel=0.2)
    assert found.cost_ms[1].value < 0.2


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("count", [1, 4, 6, 10, 20])
def test_some_pauses_of_a_rank_are_its_own_and_none_is_denied(count: int, ranks: int) -> None:
    """Up to one step in twenty; a pause may reach into the step after it."""
    for seed in range(5):
        generator = np.random.default_rng(seed)
        work = _quiet(seed, ranks, 400, "gaussian", 0.1)
        steps = np.sort(generator.choice(np.arange(5, 390, 3), count, replace=False))
        work[1, steps] += 5000.0
        if count <= 10:
            work[1, steps + 1] += 500.0
        found = find_stragglers(_rounds(work))
        assert [(1, step) for step in steps] == sorted((pause.rank, pause.step) for pause in found.pauses)
        assert not found.late and "without pauses" in found.reason
        assert found.jitter_ms.value < 1.0


@pytest.mark.parametrize(("ranks", "count", "ms"), [(2, 25, 5000.0), (8, 25, 5000.0), (8, 60, 5000.0), (4, 40, 20.0)])
def test_a_rank_that_is_late_in_more_steps_than_that_is_a_straggler(ranks: int, count: int, ms: float) -> None:
    work = _quiet(0, ranks, 400, "gaussian", 0.1)
    work[1, np.random.default_rng(1).choice(400, count, replace=False)] += ms
    found = find_stragglers(_rounds(work))
    assert found.late == [1] and not found.pauses
    assert found.cost_ms[1].value == pytest.approx(ms * count / 400, rel=0.1)


@pytest.mark.parametrize(
    ("steps", "long", "ms", "cost"), [(40, np.s_[2:40:5], 5000.0, "1,000"), (300, np.s_[100:121:3], 50.0, r"1\.[12]\d")]
)
def test_a_cost_that_may_be_chance_is_reported_as_such(steps: int, long: slice, ms: float, cost: str) -> None:
    """Steps that are too many for pauses, and too few or too near each other to be no chance between two ranks."""
    work = _quiet(0, 2, steps, "gaussian", 0.1)
    work[1, long] += ms
    found = find_stragglers(_rounds(work))
    assert not found.late and not found.pauses
    assert re.match(rf"rank 1's {cost} ms per step may be chance", found.reason)


@pytest.mark.parametrize(("error_ms", "matters"), [(0.0, r"0\.2\d\d"), (0.6, r"0\.600")])
def test_an_insignificant_difference_is_reported_with_its_bound(error_ms: float, matters: str) -> None:
    work = _quiet(0, 2, 60, "gaussian", 3.0)
    work[1] += 2.0
    found = find_stragglers(_rounds(work, error_ms=error_ms))
    assert not found.late
    assert re.search(rf"the interval is \[.*\], and less than {matters} does not count$", found.reason), found.reason


@pytest.mark.parametrize(("count", "few"), [(1, "1 step is"), (5, "5 steps are")])
def test_few_steps_name_no_straggler(count: int, few: str) -> None:
    found = find_stragglers(_rounds(_quiet(0, 2, count, "gaussian", 0.1)))
    assert not found.late and found.reason == f"{few} too few to tell a straggler from chance"


@pytest.mark.parametrize("ranks", [4, 16])
def test_two_late_ranks_are_both_named_and_share_what_they_cost(ranks: int) -> None:
    quiet = _quiet(0, ranks, 200, "gaussian", 0.2)
    one, _ = _planted(quiet, 1, 2.0)
    both, cost = _planted(one, 3, 2.0)
    both_cost = float((both.max(axis=0) - quiet.max(axis=0)).mean())
    assert cost < both_cost
    found = find_stragglers(_rounds(both))
    assert sorted(found.late) == [1, 3]
    assert sum(found.cost_ms[rank].value for rank in (1, 3)) == pytest.approx(both_cost, rel=0.2)


def test_no_rank_is_named_within_the_error_of_the_clocks() -> None:
    work, _ = _planted(_quiet(0, 4, 200, "gaussian", 0.1), 2, 2.0)
    near, far, never = (find_stragglers(_rounds(work, error_ms=ms)) for ms in (0.1, 1.5, np.inf))
    assert near.late == [2] and not far.late and not never.late
    assert "never compared" in never.reason and "somewhere in" not in never.reason


def test_what_is_less_than_a_percent_of_a_step_is_not_worth_a_name() -> None:
    assert not find_stragglers(_rounds(_planted(_quiet(0, 4, 400, "gaussian", 0.01), 2, 0.15)[0])).late


def _costs(work: Floats, late: Sequence[int] = ()) -> Floats:
    return costs(work, late, np.ones(work.shape[1]), order_of(work))


@given(st.integers(2, 6), st.integers(1, 12), st.integers(0, 99))
def test_the_names_of_ranks_do_not_matter(ranks: int, steps: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    work = generator.normal(20, 2, (ranks, steps))
    order = generator.permutation(ranks)
    np.testing.assert_allclose(_costs(work)[order], _costs(work[order]))
    for late in ([0], [0, 1] if ranks > 2 else [1]):
        renamed = [int(np.flatnonzero(order == rank)[0]) for rank in late]
        np.testing.assert_allclose(_costs(work, late)[order], _costs(work[order], renamed))
    changed = like_the_others(work)
    for rank, cost in enumerate(_costs(work)):
        mended = work.copy()
        mended[rank] = changed[rank]
        assert cost == pytest.approx(float((work.max(axis=0) - mended.max(axis=0)).mean()))
    expected = [[np.median(np.delete(work[:, s], r)) for s in range(steps)] for r in range(ranks)]
    np.testing.assert_allclose(median_of_others(work), expected)


def test_stamps_of_a_job_give_the_rank_its_cost() -> None:
    """What follows the sums counts as well: the job itself says how much shorter its steps would be."""
    quiet = _quiet(0, 4, 200, "gaussian", 0.2)
    late = np.zeros_like(quiet)
    late[2] = 2.0
    for part in ("data", "forward", "optimizer"):
        slow, fast = table_of(quiet, more_ms={part: late}), table_of(quiet)
        found = find_stragglers(from_stamps(slow))
        shorter = (slow.end_us[0, -1] - fast.end_us[0, -1]) / 1e3 / 200
        assert found.late == [2]
        assert found.cost_ms[2].value == pytest.approx(shorter, rel=0.1)
        assert found.last_share[2] > 0.9


@pytest.mark.parametrize(("part", "steps"), [("aside", np.s_[9::10]), ("forward", np.s_[:2])])
def test_evaluations_and_the_first_steps_name_no_straggler(part: str, steps: slice) -> None:
    """Evaluations begin when a rank comes to them, and end for all together."""
    quiet = _quiet(0, 4, 200, "gaussian", 0.2)
    more = np.zeros_like(quiet)
    more[0, steps] = 500.0
    found = find_stragglers(from_stamps(table_of(quiet, more_ms={part: more})))
    assert not found.late and not found.pauses


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_loaded_host_hides_no_steady_lateness(ranks: int) -> None:
    """Every seventh time of any rank is longer by up to 60% of a step, and 40 steps are all there is."""
    for seed in range(20):
        generator = np.random.default_rng(seed)
        quiet = 100 + np.abs(noise(generator, (ranks, 40), "gaussian", 1.0))
        quiet += np.where(generator.random(quiet.shape) < 1 / 7, generator.exponential(25.0, quiet.shape), 0.0)
        work, _ = _planted(quiet, seed % ranks, 10.0)
        found = find_stragglers(_rounds(work))
        assert found.late == [seed % ranks], (seed, found.reason, found.cost_ms)
        assert found.cost_ms[seed % ranks].value == pytest.approx(10.0, rel=0.2)
        assert not find_stragglers(_rounds(quiet)).late


def test_a_late_rank_is_not_excused_by_others_that_are_noisier() -> None:
    """Had it their noise too, steps would be longer for that; but it does not."""
    work = _quiet(0, 2, 400, "gaussian", 0.1)
    work[0, ::10] += 20.0
    late, shorter = _planted(work, 1, 3.0)
    assert _costs(late)[1] == pytest.approx(shorter, rel=0.2)


def _config(batch: int, **parallel: object) -> dict[str, object]:
    return {"train": {"global_batch": batch, "micro_batch": 1}, "parallel": parallel}


@pytest.mark.parametrize(
    ("config", "ranks", "passes"),
    [
        (_config(4), 3, [2, 1, 1]),
        (_config(4), 8, [1, 1, 1, 1, 0, 0, 0, 0]),
        (_config(8), 4, []),
        (_config(4, engine="ddp"), 3, [2, 1, 1]),
        (_config(4, engine="fsdp"), 3, []),  # ranks repeat some
        (_config(4, tp=3), 3, []),
        (_config(4, balance="speed"), 3, []),
        (_config(4, sync="diloco:8", workers=3), 3, [2, 1, 1]),
        (_config(7, sync="local:8", workers=2), 4, [2, 2, 2, 1]),
        ({**_config(6, sync="diloco:8", workers=2), "outer": {"shares": "2,1"}}, 2, [4, 2]),
        ({}, 3, []),
    ],
)
def test_unequal_passes_follow_from_the_options(config: dict[str, object], ranks: int, passes: list[int]) -> None:
    assert passes_by_rank(config, ranks) == passes


@pytest.mark.parametrize(
    ("passes", "slow", "more_ms", "late", "cost"),
    [
        ([2, 1, 1, 1, 1, 1, 1, 1], 0, 20.0, [0], 20.0),  # it alone has two
        ([2, 1, 1, 1, 1, 1, 1, 1], 1, 10.0, [], 0.0),  # nobody waits for it
        ([2, 2, 2, 2, 2, 2, 2, 1], 7, 30.0, [7], 10.0),  # with one pass it is later than those with two
    ],
)
def test_a_slow_rank_is_no_effect_of_its_number_of_passes(
    passes: list[int], slow: int, more_ms: float, late: list[int], cost: float
) -> None:
    own = np.array(passes)
    work = 20.0 * own[:, None] + noise(np.random.default_rng(0), (len(passes), 200), "gaussian", 0.2)
    work[slow] += more_ms
    rounds, division = without_passes(_rounds(work), passes)
    found = find_stragglers(rounds)
    assert found.late == late and found.jitter_ms.value < 1.0
    assert sum(found.cost_ms[rank].value for rank in late) == pytest.approx(cost, abs=1.0)
    assert division.cost_ms == pytest.approx(20.0 * float(np.mean(2 - own)), abs=1.0)


@pytest.mark.parametrize("late", [None, 1, 3])
@pytest.mark.parametrize("passes", [[2, 2, 1, 1], [2, 2, 2, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0, 0]])
def test_more_passes_make_no_straggler_and_hide_none_that_others_wait_for(passes: list[int], late: int | None) -> None:
    each = _quiet(0, len(passes), 200, "gaussian", 0.3)
    work = each * np.array(passes)[:, None] + 2 + noise(np.random.default_rng(1), each.shape, "gaussian", 0.2)
    if late is not None:
        work[late] += 5.0
    rounds, division = without_passes(_rounds(work), passes)
    assert find_stragglers(rounds).late == ([] if late is None or passes[late] < max(passes) else [late])
    expected = float(np.mean(max(passes) - np.array(passes))) * STEP_MS
    assert division.passes == passes and division.cost_ms == pytest.approx(expected, rel=0.2)
