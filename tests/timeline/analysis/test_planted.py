"""Planted faults that come, go and move, in runs of 2 to 512 ranks and of three days: verdict, moment, cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hvdtrain.observe.past_journal import JournalStart
from hvdtrain.observe.stamps import BLOCK, is_gathered
from hvdtrain.timeline.analysis.analyse import analyse
from hvdtrain.timeline.analysis.analysis import Analysis, figures
from hvdtrain.timeline.columns import Floats, Ints, StepTable
from hvdtrain.timeline.report.page import headline
from hvdtrain.timeline.report.terminal import summary_lines, to_text
from tests.support.step_tables import columns_of, noise, run_of, table_of

SIZES = [(2, 75), (4, 400), (32, 320)]


def _work(ranks: int, steps: int, kind: str = "gaussian", seed: int = 0) -> Floats:
    return 100 + noise(np.random.default_rng(seed), (ranks, steps), kind, 1.0)


Fault = tuple[int, float, float]
"""A rank, and from where to where of the run it is slow."""


def _planted(work: Floats, *faults: Fault) -> Floats:
    found, steps = work.copy(), work.shape[1]
    for rank, begin, end in faults:
        found[rank, int(begin * steps) : int(end * steps)] += 21.0
    return found


def _analysed(work: Floats, **more: Any) -> Analysis:
    return analyse(run_of(table_of(work), **more))


@pytest.mark.parametrize("kind", ["gaussian", "heavy", "lasting"])
@pytest.mark.parametrize(("ranks", "steps"), SIZES)
@pytest.mark.parametrize("faults", [[(1, 0.5, 1.0)], [(0, 0.0, 0.5), (1, 0.5, 1.0)], [(1, 0.3, 0.6)]])
def test_slowness_is_that_of_each_rank_in_its_time(faults: list[Fault], ranks: int, steps: int, kind: str) -> None:
    found = _analysed(_planted(_work(ranks, steps, kind), *faults))
    spells = sorted(found.blame.spells, key=lambda spell: spell.rank)
    for spell, (rank, begin, end) in zip(spells, faults, strict=True):
        assert spell.rank == rank and rank in found.blame.late and spell.lasts == (end == 1.0)
        assert abs(spell.first_step - begin * steps) <= 0.05 * steps + 1
        assert abs(spell.last_step - end * steps) <= 0.05 * steps
        assert spell.cost_ms.value == pytest.approx(21.0, rel=0.2) and spell.last_share > 0.9
    assert not [f for f in found.findings if f.kind == "jitter" and f.cost_ms and f.cost_ms > 5]


def test_the_moment_from_which_a_rank_is_slow_is_reported() -> None:
    found = _analysed(_planted(_work(4, 400), (1, 0.5, 1.0)))
    (spell,) = found.blame.spells
    assert found.blame.ranks[0].cost_ms.value == pytest.approx(21.0 / 2, rel=0.2)
    assert figures(found)["straggler_ms"] == spell.cost_ms.value and figures(found)["straggler_rank"] == 1
    for text in (*_stragglers(found), to_text(found), " ".join(summary_lines(found))):
        assert f"since step {spell.first_step:,}" in text
    (spell,) = (past := _analysed(_planted(_work(4, 400), (1, 0.3, 0.6)))).blame.spells
    assert f" in steps {spell.first_step:,} to {spell.last_step:,}" in to_text(past)


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


@pytest.mark.parametrize("kind", ["gaussian", "heavy", "lasting"])
@pytest.mark.parametrize(("ranks", "count"), [(3, 1), (4, 1), (8, 1), (16, 3), (64, 1)])
@pytest.mark.some(5)
def test_where_most_ranks_are_slow_the_fast_ones_are_named(ranks: int, count: int, kind: str) -> None:
    for seed in range(3):
        work = _work(ranks, 320, kind, seed)
        work[count:] += 8.0
        found = _analysed(work)
        assert not found.blame.late
        (fast,) = [finding for finding in found.findings if finding.kind == "fast"]
        assert fast.text.startswith(f"rank{'s' * (count > 1)} {', '.join(map(str, range(count)))} on host0")
        assert fast.cost_ms == pytest.approx(8.0, rel=0.1)
        if ranks > 3:  # of three levels of three ranks, none is usual
            late = work.copy()
            late[ranks - 1] += 8.0
            blame, truth = _analysed(late).blame, (late.max(axis=0) - work.max(axis=0)).mean()
            assert blame.late == [ranks - 1] and blame.ranks[0].cost_ms.value == pytest.approx(truth, rel=0.1)


@pytest.mark.parametrize("ranks", [8, 64, pytest.param(512, marks=pytest.mark.slow)])
def test_stragglers_near_the_threshold_are_judged_together(ranks: int) -> None:
    """Each holds up the others too, so that leaving out one of them takes from the cost of the other."""
    for seed in range(2):
        for lateness in ((4.5, 4.5), (5.5, 5.0), (5.0, 4.0)):
            quiet = _work(ranks, 150, seed=seed)
            work = quiet.copy()
            work[[3, 5]] += np.array(lateness)[:, None]
            found, truth = _analysed(work), (work.max(axis=0) - quiet.max(axis=0)).mean()
            assert sorted(found.blame.late) == [3, 5], (seed, lateness)
            assert sum(row.cost_ms.value for row in found.blame.ranks[:2]) == pytest.approx(truth, rel=0.2)


@pytest.mark.parametrize("kind", ["gaussian", "heavy", "lasting"])
@pytest.mark.parametrize(("ranks", "steps", "every"), [(2, 240, 8), (8, 240, 8), (8, 400, 16), (64, 240, 8)])
def test_workers_that_train_apart_are_judged_from_exchange_to_exchange(
    ranks: int, steps: int, every: int, kind: str
) -> None:
    quiet = _work(ranks, steps, kind, seed=ranks)
    work = _planted(quiet, (1, 0.0, 1.0))
    longest = [each.reshape(ranks, -1, every).mean(axis=2).max(axis=0).mean() for each in (work, quiet)]
    for block in (every, 50):  # in blocks of 50 steps, some exchanges begin before the block
        table = columns_of(table_of(work, every=every), np.arange(steps) % (2 * block) < block)
        found = analyse(run_of(table))
        assert found.blame.late == [1] and found.blame.causes[1][0].name == "backward"
        assert found.blame.ranks[0].cost_ms.value == pytest.approx(longest[0] - longest[1], rel=0.05)
    assert _waited(analyse(run_of(table_of(work, every=every)))) == pytest.approx(21.0 * (ranks - 1) / ranks, rel=0.2)
    none = analyse(run_of(table_of(quiet, every=every)))
    assert none.blame.steps == steps - 2, "the first two warm up"
    work[0, steps // 2] += 3000.0
    (pause,) = [finding for finding in analyse(run_of(table_of(work, every=every))).findings if finding.kind == "pause"]
    assert pause.text.startswith("rank 0 on host0 paused once") and pause.cost_ms == pytest.approx(
        3000 / steps, rel=0.2
    )
    assert not none.blame.late and [finding.kind for finding in none.findings] == ["input"]


@pytest.mark.parametrize("kind", ["gaussian", "heavy", "lasting"])
@pytest.mark.parametrize(("every", "share"), [(32, 0.1), (32, 0.3), (64, 0.2), (64, 0.6)])
@pytest.mark.some(4)
def test_a_spell_of_a_worker_may_be_shorter_than_the_time_between_exchanges(
    every: int, share: float, kind: str
) -> None:
    steps, seed = 600, round(every + 10 * share)
    quiet = _work(4, steps, kind, seed)
    work = quiet.copy()
    first = int(0.37 * (1 - share) * steps)
    work[1, first : first + round(share * steps)] += 8.0
    found, none = (analyse(run_of(table_of(each, every=every))) for each in (work, quiet))
    assert found.blame.late == [1] and not none.blame.late
    end_us = [table_of(each, every=every).end_us[:, -1].max() for each in (work, quiet)]
    assert found.blame.ranks[0].cost_ms.value == pytest.approx((end_us[0] - end_us[1]) / 1e3 / steps, rel=0.15)
    (spell,) = found.blame.spells
    assert spell.first_step == pytest.approx(first, abs=every / 4)


def _waited(found: Analysis) -> float:
    return sum(part.ms.value for part in found.budget.parts if part.name == "waiting for late ranks")


def test_ranks_that_all_wait_within_passes_hide_who_is_late() -> None:
    """What nobody measures is not none: each rank of tensor parallelism is as late as the last one."""
    for tp, unknown in ((1, False), (2, False), (4, True)):
        found = analyse(run_of(table_of(_work(4, 200)), config={"train": {}, "parallel": {"tp": tp}}))
        assert not found.blame.late and found.blame.unknown == unknown
    assert "unknown (all ranks wait for each other within passes" in to_text(found)
    assert "straggler_ms" not in figures(found)


@pytest.mark.parametrize("every", [1, 8])
def test_stragglers_cost_at_most_what_the_others_wait(every: int) -> None:
    """Also where stamps show more lateness than waits: here a rank loses the time after each exchange."""
    table = table_of(_planted(_work(4, 320), (1, 0.0, 1.0)), every=every)
    for waited in (1.0, 0.3):
        parts = {**table.parts_us, "wait": waited * table.parts_us["wait"]}
        ready = table.released_us - parts["wait"]
        blame = analyse(run_of(replace(table, parts_us=parts, ready_us=ready))).blame
        waits = parts["wait"].mean(axis=1).max() / 1e3
        assert blame.late == [1] and blame.ranks[0].cost_ms.value <= waits * 1.001
        assert blame.ranks[0].cost_ms.value > 0.9 * waited * 19.0


STEPS = 518_400
"""Three days of half a second."""


def _sampled(ranks: int, run_steps: int = STEPS) -> Ints:
    blocks = [block for block in range(run_steps // BLOCK) if is_gathered(block, ranks, run_steps)]
    steps = (np.array(blocks)[:, None] * BLOCK + np.arange(1, BLOCK + 1)).reshape(-1)
    return steps.astype(np.int32)


def _three_days(step: Ints, work: Floats) -> StepTable:
    """What is recorded of three days: stamps of `step`, and each unrecorded step took what its neighbours did."""
    table = table_of(work, block=BLOCK)
    gap_us = 1e3 * 105.0 * (np.diff(step, prepend=step[:1]) - 1).clip(0)
    late_us = np.cumsum(gap_us)
    moments = {name: getattr(table, name) + late_us for name in ("start_us", "ready_us", "released_us", "end_us")}
    return StepTable(**{**vars(table), **moments, "step": step})


@pytest.mark.parametrize(
    ("ranks", "begin", "end"),
    [
        *((16, 0.0, 0.009), (16, 0.25, 0.5), (16, 0.03, 1.0), (16, 0.9, 1.0)),
        pytest.param(512, 0.5, 1.0, marks=pytest.mark.slow),
    ],
)
def test_sampled_steps_count_by_what_they_represent(ranks: int, begin: float, end: float) -> None:
    """Most recorded steps are early ones; a rank is slow for a part of the run."""
    step = _sampled(ranks)
    slow = (step > begin * STEPS) & (step <= end * STEPS)
    work = _work(ranks, len(step), seed=1)
    work[5, slow] += 44.0
    found = analyse(run_of(_three_days(step, work)))
    assert found.blame.late == [5]
    row = found.blame.ranks[0]
    assert row.cost_ms.value == pytest.approx((end - begin) * 41.5, rel=0.2)
    (spell,) = found.blame.spells
    assert abs(spell.first_step - begin * STEPS) <= 0.05 * STEPS and abs(spell.last_step - end * STEPS) <= 0.05 * STEPS
    assert spell.cost_ms.value == pytest.approx(41.5, rel=0.2)


@pytest.mark.parametrize(("ranks", "later"), [(4, 2), (8, 8), (64, 32)])
def test_a_straggler_of_an_earlier_start_is_named_with_when_and_where(ranks: int, later: int) -> None:
    first, last = (table_of(work) for work in (_planted(_work(ranks, 200), (2, 0.0, 1.0)), _work(later, 60, seed=1)))
    last = replace(last, step=last.step + 180)  # repeats the last 20 steps of the first start
    found = analyse(run_of(last, stamped=[(-1, first), (-1, last)]))
    quiet = analyse(run_of(last))
    (finding,) = [finding for finding in found.findings if finding.kind == "straggler"]
    assert not found.blame.late and found.budget is not None and quiet.budget is not None
    figure = figures(found)
    assert figure["straggler_ms"] == pytest.approx(21.0, rel=0.2) and figure["straggler_rank"] == 2
    assert finding.cost_ms == pytest.approx(figure["straggler_ms"] * 180 / 240)
    assert finding.text.startswith(f"steps 1 to 200, on {ranks} ranks: rank 2 on host0 is a straggler")
    for text in ("; ".join(headline(found)), to_text(found), " ".join(summary_lines(found))):
        assert f"steps 1 to 200, on {ranks} ranks" in text and "rank 2 on host0" in text
    alone = [analyse(run_of(table)).budget for table in (first, last)]
    mean_ms = sum(n * budget.step_ms.value for n, budget in zip((180, 60), alone, strict=True) if budget) / 240
    assert found.budget.step_ms.value == pytest.approx(mean_ms)
    assert sum(part.ms.value for part in found.budget.parts) == pytest.approx(mean_ms)
    assert "steps 1 to 240 of 2 starts" in found.budget.what and quiet.budget == alone[1]


@pytest.mark.parametrize(
    ("ranks", "steps", "period"),
    [(8, 131_072, 128), (64, 20_480, 128), (64, 30_000, 500), pytest.param(512, 65_536, 128, marks=pytest.mark.slow)],
)
def test_pauses_that_recur_are_all_counted(ranks: int, steps: int, period: int) -> None:
    """The journal has all of them; of few, stamps show the rank."""
    step, pause_ms, generator = _sampled(ranks, steps), 1280.0, np.random.default_rng(0)
    pauses = np.arange(1, steps + 1) % period == 0
    late = np.zeros((ranks, len(step)))
    late[5, pauses[step - 1]] = pause_ms
    table = table_of(_work(ranks, len(step)), block=BLOCK, more_ms={"forward": late})
    stamped_ms = (table.end_us - table.start_us)[0] / 1e3
    took_ms = np.median(stamped_ms) + generator.normal(0, 0.5, steps) + pause_ms * pauses
    took_ms[step - 1] = stamped_ms
    end_s = np.cumsum(took_ms) / 1e3
    facts = {"size": ranks, "devices": ranks, "time": 0.0}
    start = JournalStart(facts, 1, steps, float(end_s[-1]), first_times=end_s[:32].tolist(), last_step_time=end_s[-1])
    start.steps.extend(range(1, steps + 1))
    start.seconds.extend((took_ms / 1e3).tolist())
    moments = {name: getattr(table, name) for name in ("start_us", "ready_us", "released_us", "end_us")}
    moved_us = 1e6 * end_s[step - 1] - moments["end_us"][0]
    table = replace(table, step=step, **{name: us + moved_us for name, us in moments.items()})
    found = analyse(run_of(table, starts=[start], start=start, stamped=[(0, table)]))
    (finding,) = [finding for finding in found.findings if finding.kind == "pause"]
    truth_ms, share = pause_ms / period, pause_ms / period / (104.0 + pause_ms / period)
    often = f"rank 5 on host0 paused {steps // period:,} times, about every {period} steps"
    assert (
        finding.cost_ms == pytest.approx(truth_ms, rel=0.02) and often in finding.text and often in headline(found)[-1]
    )
    assert found.goodput is not None and found.budget is not None and not found.blame.late
    hours = {use: hours / sum(found.goodput.hours.values()) for use, hours in found.goodput.hours.items()}
    assert hours["stalled steps"] == pytest.approx(share, rel=0.05) and hours["waiting for late ranks"] < 0.04
    parts = {part.name: part.ms.value for part in found.budget.parts}
    assert parts["longer steps"] == pytest.approx(truth_ms, rel=0.1)
    assert parts["waiting for late ranks"] == pytest.approx(_work(ranks, 500).max(axis=0).mean() - 100, rel=0.15)
