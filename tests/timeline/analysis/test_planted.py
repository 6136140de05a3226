"""Planted faults that come, go and move, in runs of 2 to 64 ranks and of three days: verdict, moment, cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hvdtrain.observe.stamps import BLOCK, is_gathered
from hvdtrain.timeline.analysis.analyse import analyse
from hvdtrain.timeline.analysis.analysis import Analysis, figures
from hvdtrain.timeline.columns import Floats, Ints, StepTable
from hvdtrain.timeline.report.page import headline
from hvdtrain.timeline.report.terminal import summary_lines, to_text
from tests.support.step_tables import noise, run_of, table_of

SIZES = [(2, 75), (4, 400), (64, 320)]


def _work(ranks: int, steps: int, kind: str = "gaussian", seed: int = 0) -> Floats:
    found: Floats = 100 + noise(np.random.default_rng(seed), (ranks, steps), kind, 1.0)
    return found


def _planted(work: Floats, *faults: tuple[int, slice, float]) -> Floats:
    found = work.copy()
    for rank, steps, ms in faults:
        found[rank, steps] += ms
    return found


def _analysed(work: Floats, **more: Any) -> Analysis:
    return analyse(run_of(table_of(work), **more))


@pytest.mark.parametrize("kind", ["gaussian", "heavy", "lasting"])
@pytest.mark.parametrize(("ranks", "steps"), SIZES)
def test_a_rank_that_turns_slow_is_named_with_the_moment(ranks: int, steps: int, kind: str) -> None:
    onset = int(0.5 * steps)
    found = _analysed(_planted(_work(ranks, steps, kind), (1, np.s_[onset:], 21.0)))
    assert found.blame.late == [1]
    (spell,) = found.blame.spells
    assert spell.lasts and abs(spell.first_step - (onset + 1)) <= 0.05 * steps
    assert spell.cost_ms.value == pytest.approx(21.0, rel=0.2) and spell.last_share > 0.9
    assert found.blame.ranks[0].cost_ms.value == pytest.approx(21.0 * (steps - onset) / steps, rel=0.2)
    assert figures(found)["straggler_ms"] == spell.cost_ms.value and figures(found)["straggler_rank"] == 1
    finding = next(f for f in found.findings if f.kind == "straggler")
    assert f"is a straggler since step {spell.first_step:,} and costs" in finding.text
    for text in (to_text(found), " ".join(summary_lines(found))):
        assert f"since step {spell.first_step:,}" in text


@pytest.mark.parametrize(("ranks", "steps"), SIZES)
def test_slowness_that_moves_is_that_of_each_rank_in_its_time(ranks: int, steps: int) -> None:
    half = steps // 2
    found = _analysed(_planted(_work(ranks, steps), (0, np.s_[:half], 21.0), (1, np.s_[half:], 21.0)))
    assert sorted(found.blame.late) == [0, 1]
    spells = sorted(found.blame.spells, key=lambda spell: spell.rank)
    assert [spell.lasts for spell in spells] == [False, True]
    for spell, edge in zip(spells, (spells[0].last_step, spells[1].first_step), strict=True):
        assert abs(edge - half) <= 0.05 * steps
        assert spell.cost_ms.value == pytest.approx(21.0, rel=0.2)
    assert not [f for f in found.findings if f.kind == "jitter" and f.cost_ms and f.cost_ms > 5]


@pytest.mark.parametrize(("ranks", "steps"), SIZES)
def test_a_rank_that_was_slow_for_a_while_is_named_with_its_spell(ranks: int, steps: int) -> None:
    begin, end = int(0.3 * steps), int(0.6 * steps)
    found = _analysed(_planted(_work(ranks, steps), (ranks - 1, np.s_[begin:end], 21.0)))
    (spell,) = found.blame.spells
    assert (spell.rank, spell.lasts) == (ranks - 1, False)
    assert abs(spell.first_step - begin) <= 0.05 * steps and abs(spell.last_step - end) <= 0.05 * steps
    assert f" in steps {spell.first_step:,} to {spell.last_step:,}" in to_text(found)


@pytest.mark.parametrize("kind", ["gaussian", "heavy", "lasting"])
@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_a_rank_that_is_slow_in_most_steps_costs_the_mean_of_all(ranks: int, kind: str) -> None:
    for seed in range(3):
        work = _work(ranks, 400, kind, seed)
        late = work.copy()
        late[1, np.random.default_rng(seed + 9).random(400) < 0.8] += 21.0
        found, truth = _analysed(late), (late.max(axis=0) - work.max(axis=0)).mean()
        assert found.blame.late == [1] and not found.blame.spells
        cost = found.blame.ranks[0].cost_ms
        assert cost.value == pytest.approx(truth, rel=0.1) and cost.low <= truth <= cost.high


@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_a_rank_that_is_always_slow_has_no_spells(ranks: int) -> None:
    for kind in ("gaussian", "heavy", "lasting"):
        found = _analysed(_planted(_work(ranks, 320, kind), (1, np.s_[:], 21.0)))
        assert found.blame.late == [1] and not found.blame.spells, kind


def _stragglers(found: Analysis) -> list[str]:
    return [finding.text for finding in found.findings if finding.kind == "straggler"]


@pytest.mark.parametrize("kind", ["gaussian", "lasting"])
def test_a_slow_host_is_one_finding_with_what_it_costs(kind: str) -> None:
    work = _work(64, 320, kind)
    work[8:16] += 8.0
    found = _analysed(work)
    (text,) = _stragglers(found)
    assert sorted(found.blame.late) == list(range(8, 16))
    assert text.startswith("host host1 with ranks 8, 9, 10, 11 and 4 more is slow")
    assert figures(found)["straggler_ms"] == pytest.approx(7.0, rel=0.2)
    assert "host host1 is a straggler and costs" in "; ".join(headline(found)) and "more" not in headline(found)[-1]
    assert "straggler: host host1 costs" in " ".join(summary_lines(found))


def test_ranks_on_several_hosts_do_not_hide_each_other() -> None:
    work, slow = _work(64, 320), [3, 12, 20, 31, 40, 44, 50, 63]
    work[slow] += 8.0
    found = _analysed(work)
    assert sorted(found.blame.late) == slow and len(_stragglers(found)) == 8
    assert not [finding for finding in found.findings if finding.kind == "jitter" and "rank 3" in finding.text]


def test_where_most_ranks_are_slow_the_fast_ones_are_named() -> None:
    work = _work(16, 320)
    work[3:] += 8.0
    (text,) = _stragglers(_analysed(work))
    assert text.startswith("13 of 16 ranks are slower than ranks 0, 1, 2 on host0, and costs")


def test_without_a_fault_nobody_is_named() -> None:
    sizes = [(2, 75), (2, 400), (4, 150), (64, 320)]
    named = [
        _analysed(_work(ranks, steps, kind, seed)).blame.late
        for seed in range(4)
        for ranks, steps in sizes
        for kind in ("gaussian", "heavy", "lasting")
    ]
    assert len(named) == 48 and sum(map(bool, named)) == 0


STEPS = 518_400
"""Three days of half a second."""


def _sampled(ranks: int) -> Ints:
    blocks = [block for block in range(STEPS // BLOCK) if is_gathered(block, ranks, STEPS)]
    steps = (np.array(blocks)[:, None] * BLOCK + np.arange(1, BLOCK + 1)).reshape(-1)
    return steps.astype(np.int32)


def _three_days(step: Ints, work: Floats) -> StepTable:
    """What is recorded of three days: stamps of `step`, and each unrecorded step took what its neighbours did."""
    table = table_of(work, block=BLOCK)
    gap_us = 1e3 * 105.0 * (np.diff(step, prepend=step[:1]) - 1).clip(0)
    late_us = np.cumsum(gap_us)
    moments = {name: getattr(table, name) + late_us for name in ("start_us", "ready_us", "released_us", "end_us")}
    return StepTable(**{**vars(table), **moments, "step": step})


@pytest.mark.parametrize(("begin", "end"), [(0.0, 0.009), (0.25, 0.5), (0.03, 1.0), (0.9, 1.0)])
def test_sampled_steps_count_by_what_they_represent(begin: float, end: float) -> None:
    """Most recorded steps are early ones; a rank is slow for a part of the run."""
    step = _sampled(64)
    slow = (step > begin * STEPS) & (step <= end * STEPS)
    work = _work(64, len(step), seed=1)
    work[5, slow] += 44.0
    found = analyse(run_of(_three_days(step, work)))
    assert found.blame.late == [5]
    row = found.blame.ranks[0]
    assert row.cost_ms.value == pytest.approx((end - begin) * 41.5, rel=0.2)
    (spell,) = found.blame.spells
    assert abs(spell.first_step - begin * STEPS) <= 0.05 * STEPS and abs(spell.last_step - end * STEPS) <= 0.05 * STEPS
    assert spell.cost_ms.value == pytest.approx(41.5, rel=0.2)


@pytest.mark.parametrize("fault", ["late", pytest.param("moving", marks=pytest.mark.slow), "host", "data", "none"])
def test_512_ranks_and_three_days(fault: str) -> None:
    step = _sampled(512)
    work, half = _work(512, len(step), seed=3), step > STEPS / 2
    sizes = np.random.default_rng(4).integers(2000, 6000, work.shape).astype(float)
    late = {"late": [7], "moving": [7, 300], "host": list(range(16, 24))}.get(fault, [])
    if fault == "late":
        work[7, half] += 44.0
    elif fault == "moving":
        work[7, ~half] += 44.0
        work[300, half] += 44.0
    elif fault == "host":
        work[16:24] += 22.0
    table = _three_days(step, work)
    if fault == "data":
        late_us = 1e3 * 0.01 * sizes
        ready = table.ready_us + late_us
        more_us = (ready.max(axis=0) - table.ready_us.max(axis=0))[None]
        table = replace(
            table,
            ready_us=ready,
            released_us=table.released_us + more_us,
            end_us=table.end_us + more_us,
            elements=sizes,
        )
    found = analyse(run_of(table))
    assert sorted(found.blame.late) == late
    for spell in found.blame.spells:
        turned = spell.first_step if spell.lasts else spell.last_step
        assert abs(turned - STEPS / 2) <= 0.05 * STEPS and spell.cost_ms.value == pytest.approx(41.0, rel=0.2)
    assert bool(found.blame.spells) == (fault in ("late", "moving"))
    assert bool(_kinds_of(found) & {"batch_sizes"}) == (fault == "data")


def _kinds_of(found: Analysis) -> set[str]:
    return {finding.kind for finding in found.findings}


def test_lateness_that_grows_slowly_costs_its_mean_over_the_run() -> None:
    """Early steps are recorded more often."""
    step = _sampled(64)
    work = _work(64, len(step), seed=2)
    work[5] += 20.0 + 40.0 * step / STEPS
    found = analyse(run_of(_three_days(step, work)))
    assert found.blame.ranks[0].cost_ms.value == pytest.approx(40.0 - 2.4, rel=0.01)
