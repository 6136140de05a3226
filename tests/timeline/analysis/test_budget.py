"""The budget sums to the wall time, whatever the spans are; sets of intervals against a count of moments."""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hvdtrain.observe.past_journal import JournalStart
from hvdtrain.observe.stamps import BLOCK, is_gathered
from hvdtrain.timeline.analysis.analyse import analyse
from hvdtrain.timeline.analysis.analysis import Budget, figures
from hvdtrain.timeline.analysis.budget import IDLE, LATE, sample_of, step_budget, step_parts, timeline_budget
from hvdtrain.timeline.analysis.phases import Span, common, count_steps, length, partition, union, within, without
from hvdtrain.timeline.columns import RunTrace, StepTable
from hvdtrain.timeline.report.page import headline
from hvdtrain.timeline.report.terminal import to_text
from tests.support.step_tables import columns_of, noise, table_of
from tests.support.timelines import Turn, trace_of


def _any_table(seed: int, ranks: int, steps: int) -> StepTable:
    """Moments in their order, parts of any length: also of more than there was time."""
    generator = np.random.default_rng(seed)
    moments = np.cumsum(generator.exponential(1000.0, (steps, 4, ranks)).cumsum(axis=1), axis=0)
    for step in range(1, steps):
        moments[step] += moments[step - 1, 3]
    start, ready, released, end = np.moveaxis(moments, 1, 0).transpose(0, 2, 1)
    parts = {name: generator.exponential(800.0, (ranks, steps)) for name in ("data", "forward", "backward", "aside")}
    step = np.cumsum(generator.integers(1, 3, steps)).astype(np.int32)
    return StepTable([""] * ranks, step, step // 5, start, ready, released, end, parts, [], np.zeros(ranks))


def _parts(budget: Budget | None) -> dict[str, float]:
    """The parts of a budget, ms, which sum to its step."""
    parts = {part.name: part.ms.value for part in budget.parts}
    assert sum(parts.values()) == pytest.approx(budget.step_ms.value)
    return parts


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 30))
def test_parts_sum_to_the_wall_time_of_every_rank_and_step(seed: int, ranks: int, steps: int) -> None:
    table = _any_table(seed, ranks, steps)
    wall, parts = step_parts(table, sample_of(table))
    np.testing.assert_allclose(sum(parts.values()), wall)
    assert all((values >= 0).all() for values in parts.values())
    budget = step_budget(table)
    assert _parts(budget) and budget is not None
    assert sum(part.share for part in budget.parts) == pytest.approx(1)
    assert all(part.ms.low <= part.ms.value <= part.ms.high for part in budget.parts)


def test_the_budget_is_that_of_the_job() -> None:
    work = 20 + noise(np.random.default_rng(0), (4, 100), "gaussian", 0.5)
    aside = np.zeros_like(work)
    aside[:, 9::10] = 100.0  # before these steps begin
    table = table_of(work, exchange_ms=3.0, more_ms={"aside": aside})
    budget = step_budget(table)
    parts = _parts(budget)
    assert budget.what == "mean of 4 ranks" and budget.steps == 98
    assert budget.step_ms.value * 98 == pytest.approx((table.end_us[:, -1] - table.end_us[:, 1]).mean() / 1e3)
    assert parts["exchange"] == pytest.approx(3.0)
    assert parts["evaluations and checkpoints"] == pytest.approx(aside[:, 2:].mean())
    assert parts["forward"] == pytest.approx(0.3 * work[:, 2:].mean())
    ready = table.ready_us[:, 2:]
    assert parts[LATE] == pytest.approx((ready.max(axis=0) - ready).mean() / 1e3)
    assert set(budget.exposed) == {"exchange"}


def test_what_is_exposed_is_cut_by_horovods_phases() -> None:
    table = table_of(np.full((2, 20), 20.0), exchange_ms=4.0)
    phases = {"NEGOTIATE_ALLREDUCE": 1000, "QUEUE": 500, "MPI_ALLREDUCE": 2000}
    turns = [Turn("allreduce.gradients/0", float(t), phases) for t in table.ready_us.max(axis=0)[5:10]]
    budget = step_budget(table, [trace_of(turns)])
    parts = _parts(budget)
    # The window ends with the last transfer, 0.5 ms before the sums are there.
    assert parts["transfer"] / parts["negotiation"] == pytest.approx(2.0)
    assert parts["queue"] / parts["negotiation"] == pytest.approx(0.5)
    assert sum(parts[name] for name in budget.exposed if name in parts) == pytest.approx(4.0)


def test_a_timeline_of_another_clock_cuts_nothing() -> None:
    table = table_of(np.full((2, 20), 20.0), exchange_ms=4.0)
    phases = {"NEGOTIATE_ALLREDUCE": 10.0, "MPI_ALLREDUCE": 10.0}
    elsewhere = [Turn("x", 1e3 * i, phases) for i in range(5)]
    beside = [Turn("x", float(t) + 500.0, phases) for t in table.start_us[0]]
    for turns in (elsewhere, beside):
        budget = step_budget(table, [trace_of(turns)])
        assert "exchange" in budget.exposed and "transfer" not in budget.exposed


@pytest.mark.parametrize("every", [50, 64])
def test_the_steps_of_a_long_run_that_are_not_stamped_count_too(every: int) -> None:
    generator = np.random.default_rng(every)
    work = np.where(np.arange(8000) < 1000, 50.0, 100.0) + noise(generator, (8, 8000), "gaussian", 1.0)
    aside = np.zeros_like(work)
    aside[:, every::every] = 1000.0
    whole = table_of(work, exchange_ms=5.0, more_ms={"aside": aside}, block=BLOCK)
    table = columns_of(whole, np.flatnonzero([is_gathered(i // BLOCK, 8) for i in range(8000)]))
    budget, truth = step_budget(table), step_budget(whole)
    found, exact = _parts(budget), _parts(truth)
    assert budget.step_ms.value == pytest.approx(truth.step_ms.value, rel=0.01)
    assert {name: found[name] for name in exact} == pytest.approx(exact, rel=0.03, abs=0.01)
    assert budget.step_ms.low <= truth.step_ms.value <= budget.step_ms.high
    some, all_of_them = (analyse(RunTrace(Path("run"), 8, steps=each)).notes for each in (table, whole))
    assert any(f"{budget.steps:,} of {sample_of(table).steps.sum():,.0f} steps" in note for note in some)
    assert not any("were stamped" in note for note in all_of_them)


def test_slow_steps_without_stamps_are_not_evaluations() -> None:
    """Only the journal has them."""
    steps, stamped = 2000, np.arange(2000) // BLOCK % 4 == 0
    slow = ~stamped & (np.arange(steps) % 5 == 0)
    work = 50.0 + noise(np.random.default_rng(0), (2, steps), "gaussian", 0.5) + np.where(slow, 400.0, 0.0)
    aside = np.zeros_like(work)
    aside[:, 100::100] = 1000.0
    whole = table_of(work, exchange_ms=5.0, more_ms={"aside": aside}, block=BLOCK)
    took = (whole.end_us - whole.start_us)[0] / 1e6
    journal = JournalStart({}, steps=array("q", range(1, steps + 1)), seconds=array("d", took.tolist()))
    found, exact = _parts(step_budget(columns_of(whole, stamped), journal=journal)), _parts(step_budget(whole))
    assert found["evaluations and checkpoints"] == pytest.approx(exact["evaluations and checkpoints"], rel=0.1)
    assert found["longer steps"] == pytest.approx(400.0 * slow.mean(), rel=0.05)


@given(st.integers(0, 10_000), st.floats(0.1, 0.9))
def test_whatever_is_stamped_the_wall_time_is_the_runs(seed: int, share: float) -> None:
    chosen = np.flatnonzero(np.random.default_rng(seed).random(40) < share)
    assume(len(chosen) >= 2)
    some = columns_of(_any_table(seed, 3, 40), chosen)
    sample, budget = sample_of(some), step_budget(some)
    assert sample.weights.sum() == pytest.approx(sample.steps.sum())
    assert _parts(budget) and budget is not None
    took = (some.end_us[:, -1] - sample.begin_us[:, 0]).mean() / 1e3
    assert budget.step_ms.value * sample.steps.sum() == pytest.approx(took)
    assert all(part.ms.low <= part.ms.value * (1 + 1e-9) and part.ms.value <= part.ms.high for part in budget.parts)


@pytest.mark.parametrize("steps", [1, 2])
def test_what_was_evaluated_before_the_first_step_is_no_part_of_it(steps: int) -> None:
    aside = np.zeros((1, steps))
    aside[:, 0] = 5000.0
    parts = _parts(step_budget(table_of(np.full((1, steps), 1000.0), more_ms={"aside": aside})))
    assert "evaluations and checkpoints" not in parts and parts["forward"] == pytest.approx(300.0)


@given(st.integers(0, 1000), st.integers(1, 4), st.integers(2, 10))
def test_a_timeline_by_itself_sums_to_its_extent(seed: int, tensors: int, turns: int) -> None:
    generator = np.random.default_rng(seed)
    names = ("NEGOTIATE_ALLREDUCE", "QUEUE", "MEMCPY_IN_FUSION_BUFFER", "NCCL_ALLREDUCE", "INIT_NCCL")
    all_turns = []
    for turn in range(turns):
        for tensor in range(tensors):
            phases = dict(zip(names, generator.exponential(500, 5), strict=True))
            all_turns.append(Turn(f"t{tensor}", 1e4 * turn + generator.uniform(0, 9e3), phases))
    trace = trace_of(all_turns)
    budget = timeline_budget([trace])
    assert _parts(budget) and budget is not None and count_steps(trace) == budget.steps == turns
    extent = (trace.start_us + trace.duration_us).max() - trace.start_us.min()
    assert budget.step_ms.value * turns == pytest.approx(extent / 1e3)


UNEQUAL = [Turn(f"t{i}", 100.0 * i + j, {"ALLREDUCE": 5.0}) for i in range(6) for j in range(3 * i + 1)]
"""Each tensor comes more often than the one before."""


def test_tensors_that_come_unequally_often_are_no_steps() -> None:
    trace = trace_of(UNEQUAL)
    budget = timeline_budget([trace])
    assert count_steps(trace) == 0 and budget is not None and budget.steps == 0 and IDLE in _parts(budget)
    analysis = analyse(RunTrace(Path("timeline.json"), 2, horovod=[trace]))
    assert not {"step_ms", "transfer_ms"} & figures(analysis).keys()
    assert "spans 0.52" in to_text(analysis) and "a step" not in to_text(analysis)
    assert "spans 0.520 ms" in headline(analysis)[0] and "step time" not in headline(analysis)[0]


@pytest.mark.parametrize("steps", [20, 150])
def test_steps_are_found_between_what_a_trainer_exchanges_besides(steps: int) -> None:
    """Plans and a probe of the link before, evaluations and saves between and after."""
    probe = [(1e6 + 100.0 * i, f"link/{i % 3}") for i in range(27)]
    start = [(1e4 * i, f"once/{i}") for i in range(60)] + probe + [(1e6, "evaluate")]
    of_steps = [(2e6 + 1e5 * i + 1e3 * j, name) for i in range(steps) for j, name in enumerate(("gradients", "totals"))]
    aside = [
        (2e6 + 1e5 * i + 5e4, name) for i in range(steps // 10, steps, steps // 4) for name in ("evaluate", "save")
    ]
    end = [(2e6 + 1e5 * steps + 1e7 * (1 + i), name) for i, name in enumerate(("evaluate", "save", "figures"))]
    turns = [Turn(name, us, {"ALLREDUCE": 5.0}) for us, name in (*start, *of_steps, *aside, *end)]
    found = analyse(RunTrace(Path("t.json"), 2, horovod=[trace_of(turns)])).budget
    assert found is not None and found.steps == steps - 1 and found.step_ms.value == pytest.approx(100.0, rel=0.06)


def test_a_segment_without_steps_does_not_take_them_from_the_others() -> None:
    regular, other = trace_of([Turn("t", 1e3 * i, {"ALLREDUCE": 5.0}) for i in range(6)]), trace_of(UNEQUAL)
    alone, both = (analyse(RunTrace(Path("t.json"), 2, horovod=traces)) for traces in ([regular], [regular, other]))
    assert alone.budget == both.budget and both.budget is not None and both.budget.steps > 0
    assert any("no recognisable steps" in note for note in both.notes)


def test_nothing_is_made_of_nothing() -> None:
    assert timeline_budget([]) is None and timeline_budget([trace_of([])]) is None
    assert step_budget(columns_of(table_of(np.full((2, 1), 20.0)), np.array([False]))) is None


SETS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)


def _span(pairs: list[tuple[int, int]]) -> Span:
    return union(np.array([a for a, _ in pairs], float), np.array([b for _, b in pairs], float))


def _moments(span: Span) -> set[int]:
    return {t for a, b in zip(*span, strict=True) for t in range(int(a), int(b))}


@given(SETS, SETS)
def test_sets_hold_the_moments_that_they_should(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    one, other = _span(a), _span(b)
    assert _moments(one) == {t for low, high in a for t in range(low, high)}
    assert length(one) == len(_moments(one))
    assert (one[0][1:] > one[1][:-1]).all()
    assert _moments(common(one, other)) == _moments(one) & _moments(other)
    assert _moments(without(one, other)) == _moments(one) - _moments(other)


@given(SETS, st.integers(0, 40), st.integers(0, 40))
def test_what_lies_within_is_counted(a: list[tuple[int, int]], start: int, more: int) -> None:
    found = within(_span(a), np.array([float(start)]), np.array([float(start + more)]))
    assert found.tolist() == [len(_moments(_span(a)) & set(range(start, start + more)))]


@given(SETS, st.lists(SETS, max_size=4))
def test_a_partition_sums_to_the_whole_and_the_first_part_comes_first(
    whole: list[tuple[int, int]], parts: list[list[tuple[int, int]]]
) -> None:
    given_parts = {str(i): _span(part) for i, part in enumerate(parts)}
    cut = partition(_span(whole), given_parts)
    assert sum(map(length, cut.values())) == length(_span(whole))
    left = _moments(_span(whole))
    for name, part in given_parts.items():
        assert _moments(cut[name]) == left & _moments(part)
        left -= _moments(part)
