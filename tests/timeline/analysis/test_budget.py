"""The budget sums to the wall time, whatever the spans are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.observe.stamps import BLOCK, is_gathered
from hvdtrain.timeline.analysis.analyse import analyse
from hvdtrain.timeline.analysis.analysis import Analysis, figures
from hvdtrain.timeline.analysis.budget import IDLE, LATE, sample_of, step_budget, step_parts, timeline_budget
from hvdtrain.timeline.analysis.phases import count_steps
from hvdtrain.timeline.columns import Ints, JournalSteps, RunTrace, StepTable
from hvdtrain.timeline.report.compare import compare
from hvdtrain.timeline.report.page import headline
from hvdtrain.timeline.report.terminal import to_text
from tests.support.step_tables import noise, table_of
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


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 30))
def test_parts_sum_to_the_wall_time_of_every_rank_and_step(seed: int, ranks: int, steps: int) -> None:
    table = _any_table(seed, ranks, steps)
    wall, parts = step_parts(table)
    np.testing.assert_allclose(sum(parts.values()), wall)
    assert all((values >= 0).all() for values in parts.values())
    budget = step_budget(table)
    assert budget is not None
    assert sum(part.ms.value for part in budget.parts) == pytest.approx(budget.step_ms.value)
    assert sum(part.share for part in budget.parts) == pytest.approx(1)
    assert all(part.ms.low <= part.ms.value <= part.ms.high for part in budget.parts)


def test_the_budget_is_that_of_the_job() -> None:
    generator = np.random.default_rng(0)
    work = 20 + noise(generator, (4, 100), "gaussian", 0.5)
    aside = np.zeros_like(work)
    aside[:, 9::10] = 100.0  # before these steps begin
    table = table_of(work, exchange_ms=3.0, more_ms={"aside": aside})
    budget = step_budget(table)
    assert budget is not None and budget.what == "mean of 4 ranks" and budget.steps == 98
    wall_ms = (table.end_us[:, -1] - table.end_us[:, 1]).mean() / 1e3
    assert budget.step_ms.value * 98 == pytest.approx(wall_ms)
    parts = {part.name: part.ms.value for part in budget.parts}
    assert parts["exchange"] == pytest.approx(3.0)
    assert parts["evaluations and checkpoints"] == pytest.approx(aside[:, 2:].mean())
    assert parts["forward"] == pytest.approx(0.3 * work[:, 2:].mean())
    ready = table.ready_us[:, 2:]
    assert parts[LATE] == pytest.approx((ready.max(axis=0) - ready).mean() / 1e3)
    assert set(budget.exposed) == {LATE, "exchange"}


def test_what_is_exposed_is_cut_by_horovods_phases() -> None:
    table = table_of(np.full((2, 20), 20.0), exchange_ms=4.0)
    ready = table.ready_us.max(axis=0)
    turns = [
        Turn("allreduce.gradients/0", float(t), {"NEGOTIATE_ALLREDUCE": 1000, "QUEUE": 500, "MPI_ALLREDUCE": 2000})
        for t in ready[5:10]
    ]
    budget = step_budget(table, [trace_of(turns)])
    assert budget is not None
    parts = {part.name: part.ms.value for part in budget.parts}
    # The window ends with the last transfer, 0.5 ms before the sums are there.
    assert parts["transfer"] / parts["negotiation"] == pytest.approx(2.0)
    assert parts["queue"] / parts["negotiation"] == pytest.approx(0.5)
    exposed = sum(part.ms.value for part in budget.parts if part.name in budget.exposed)
    assert exposed == pytest.approx(4.0)
    assert sum(part.ms.value for part in budget.parts) == pytest.approx(budget.step_ms.value)


def test_a_timeline_of_another_clock_cuts_nothing() -> None:
    table = table_of(np.full((2, 20), 20.0), exchange_ms=4.0)
    phases = {"NEGOTIATE_ALLREDUCE": 10.0, "MPI_ALLREDUCE": 10.0}
    elsewhere = [Turn("x", 1e3 * i, phases) for i in range(5)]
    beside = [Turn("x", float(t) + 500.0, phases) for t in table.start_us[0]]
    for turns in (elsewhere, beside):
        budget = step_budget(table, [trace_of(turns)])
        assert budget is not None and "exchange" in budget.exposed and "transfer" not in budget.exposed


def _stamped(table: StepTable, columns: Ints) -> StepTable:
    """What is left of a table of which only some steps are stamped."""
    moments = {name: getattr(table, name)[:, columns] for name in ("start_us", "ready_us", "released_us", "end_us")}
    parts = {name: values[:, columns] for name, values in table.parts_us.items()}
    return replace(table, step=table.step[columns], block=table.block[columns], parts_us=parts, **moments)


@pytest.mark.parametrize("every", [50, 64])
def test_the_steps_of_a_long_run_that_are_not_stamped_count_too(every: int) -> None:
    generator = np.random.default_rng(every)
    work = np.where(np.arange(8000) < 1000, 50.0, 100.0) + noise(generator, (8, 8000), "gaussian", 1.0)
    aside = np.zeros_like(work)
    aside[:, every::every] = 1000.0
    whole = table_of(work, exchange_ms=5.0, more_ms={"aside": aside}, block=BLOCK)
    table = _stamped(whole, np.flatnonzero([is_gathered(i // BLOCK, 8) for i in range(8000)]))
    budget, truth = step_budget(table), step_budget(whole)
    assert budget is not None and truth is not None
    assert sum(part.ms.value for part in budget.parts) == pytest.approx(budget.step_ms.value)
    assert budget.step_ms.value == pytest.approx(truth.step_ms.value, rel=0.01)
    exact = {part.name: part.ms.value for part in truth.parts}
    for part in budget.parts:
        assert part.ms.value == pytest.approx(exact[part.name], rel=0.03, abs=0.01), part.name
    assert budget.step_ms.low <= truth.step_ms.value <= budget.step_ms.high
    notes = analyse(RunTrace(Path("run"), 8, steps=table)).notes
    assert any(f"{budget.steps:,} of 7,9" in note for note in notes)
    assert not any("were stamped" in note for note in analyse(RunTrace(Path("run"), 8, steps=whole)).notes)


def test_slow_steps_without_stamps_are_not_evaluations() -> None:
    """Only the journal has them."""
    steps, stamped = 2000, np.arange(2000) // BLOCK % 4 == 0
    slow = ~stamped & (np.arange(steps) % 5 == 0)
    work = 50.0 + noise(np.random.default_rng(0), (2, steps), "gaussian", 0.5) + np.where(slow, 400.0, 0.0)
    aside = np.zeros_like(work)
    aside[:, 100::100] = 1000.0
    whole = table_of(work, exchange_ms=5.0, more_ms={"aside": aside}, block=BLOCK)
    truth = step_budget(whole)
    took = (whole.end_us - whole.start_us)[0] / 1e3
    journal = JournalSteps(np.arange(1, steps + 1), took, {}, np.zeros(steps))
    budget = step_budget(_stamped(whole, np.flatnonzero(stamped)), journal=journal)
    assert budget is not None and truth is not None
    found, exact = ({part.name: part.ms.value for part in each.parts} for each in (budget, truth))
    assert found["evaluations and checkpoints"] == pytest.approx(exact["evaluations and checkpoints"], rel=0.1)
    assert found["longer steps without stamps"] == pytest.approx(400.0 * slow.mean(), rel=0.05)
    assert sum(found.values()) == pytest.approx(budget.step_ms.value)


@given(st.integers(0, 10_000), st.floats(0.1, 0.9))
def test_whatever_is_stamped_the_wall_time_is_the_runs(seed: int, share: float) -> None:
    table = _any_table(seed, 3, 40)
    chosen = np.flatnonzero(np.random.default_rng(seed).random(40) < share)
    if len(chosen) < 2:
        return
    some = _stamped(table, chosen)
    sample = sample_of(some)
    assert sample.weights.sum() == pytest.approx(sample.steps.sum())
    budget = step_budget(some)
    assert budget is not None
    assert sum(part.ms.value for part in budget.parts) == pytest.approx(budget.step_ms.value)
    took = (some.end_us[:, -1] - sample.begin_us[:, 0]).mean() / 1e3
    assert budget.step_ms.value * sample.steps.sum() == pytest.approx(took)
    assert all(part.ms.low <= part.ms.value * (1 + 1e-9) and part.ms.value <= part.ms.high for part in budget.parts)


@pytest.mark.parametrize("steps", [1, 2])
def test_what_was_evaluated_before_the_first_step_is_no_part_of_it(steps: int) -> None:
    aside = np.zeros((1, steps))
    aside[:, 0] = 5000.0
    budget = step_budget(table_of(np.full((1, steps), 1000.0), more_ms={"aside": aside}))
    assert budget is not None
    parts = {part.name: part.ms.value for part in budget.parts}
    assert "evaluations and checkpoints" not in parts and parts["forward"] == pytest.approx(300.0)


def test_a_timeline_of_few_steps_leaves_shares_uncertain() -> None:
    """The same job twice, with different traced steps."""
    generator = np.random.default_rng(0)
    table = table_of(20 + noise(generator, (2, 100), "gaussian", 0.3), exchange_ms=4.0)
    ready = table.ready_us.max(axis=0)

    def analysed(first: int, steps: int) -> Analysis:
        turns = [
            Turn("g", float(ready[i]), {"NEGOTIATE_ALLREDUCE": us, "MPI_ALLREDUCE": 3000 - us})
            for i in range(first, first + steps)
            for us in [float(generator.uniform(0, 1500))]
        ]
        return analyse(RunTrace(Path("run"), 2, steps=table, horovod=[trace_of(turns)]))

    for steps in (1, 12):
        pairs = [(analysed(10 + 5 * i, steps), analysed(60 + i, steps)) for i in range(8)]
        rows = [row for a, b in pairs for row in compare(a, b, {}, {}).rows]
        assert sum(not row.is_noise for row in rows) <= (0 if steps == 1 else 2)
    parts = {part.name: part.ms for part in pairs[0][0].budget.parts}  # type: ignore[union-attr]
    assert parts["transfer"].low < parts["transfer"].value - 0.1


@given(st.integers(0, 1000), st.integers(1, 4), st.integers(2, 10))
def test_a_timeline_by_itself_sums_to_its_extent(seed: int, tensors: int, turns: int) -> None:
    generator = np.random.default_rng(seed)
    names = ("NEGOTIATE_ALLREDUCE", "QUEUE", "MEMCPY_IN_FUSION_BUFFER", "NCCL_ALLREDUCE", "INIT_NCCL")
    all_turns = [
        Turn(
            f"t{tensor}",
            1e4 * turn + generator.uniform(0, 9e3),
            dict(zip(names, generator.exponential(500, 5), strict=True)),
        )
        for turn in range(turns)
        for tensor in range(tensors)
    ]
    trace = trace_of(all_turns)
    assert count_steps(trace) == turns
    budget = timeline_budget([trace])
    assert budget is not None and budget.steps == turns
    extent = (trace.start_us + trace.duration_us).max() - trace.start_us.min()
    assert budget.step_ms.value * turns == pytest.approx(extent / 1e3)
    assert sum(part.ms.value for part in budget.parts) == pytest.approx(budget.step_ms.value)


def test_tensors_that_come_unequally_often_are_no_steps() -> None:
    turns = [Turn(f"t{i}", 100.0 * i + j, {"ALLREDUCE": 5.0}) for i in range(6) for j in range(3 * i + 1)]
    trace = trace_of(turns)
    assert count_steps(trace) == 0
    budget = timeline_budget([trace])
    assert budget is not None and budget.steps == 0
    assert IDLE in {part.name for part in budget.parts}
    analysis = analyse(RunTrace(Path("timeline.json"), 2, horovod=[trace]))
    assert "step_ms" not in figures(analysis) and "transfer_ms" not in figures(analysis)
    assert "spans 0.52" in to_text(analysis) and "a step" not in to_text(analysis)
    assert "spans 0.520 ms" in headline(analysis)[0] and "step time" not in headline(analysis)[0]


def test_a_segment_without_steps_does_not_take_them_from_the_others() -> None:
    regular = trace_of([Turn("t", 1e3 * i, {"ALLREDUCE": 5.0}) for i in range(6)])
    other = trace_of([Turn(f"t{i}", 100.0 * i + j, {"ALLREDUCE": 5.0}) for i in range(6) for j in range(3 * i + 1)])
    alone, both = (
        analyse(RunTrace(Path("timeline.json"), 2, horovod=traces)) for traces in ([regular], [regular, other])
    )
    assert alone.budget == both.budget and both.budget is not None and both.budget.steps > 0
    assert any("it has no recognisable steps" in note for note in both.notes)


def test_nothing_is_made_of_nothing() -> None:
    assert timeline_budget([]) is None and timeline_budget([trace_of([])]) is None
    table = table_of(np.full((2, 1), 20.0))
    empty = replace(
        table, **{name: getattr(table, name)[:, :0] for name in ("start_us", "ready_us", "released_us", "end_us")}
    )
    parts = {name: values[:, :0] for name, values in table.parts_us.items()}
    empty = replace(empty, step=table.step[:0], block=table.block[:0], parts_us=parts)
    assert step_budget(empty) is None
