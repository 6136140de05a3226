"""Law 8 on real jobs whose compute is sleep: the budget sums, and a planted straggler is named with its cause.

Verdicts on other faults follow from recorded stamps: tests/timeline/analysis. By how much a rank is said to be late,
and that nobody is named without a fault, is measured by benchmarks/straggler.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.observe.past_journal import read_steps
from hvdtrain.timeline.analysis.analyse import analyse
from hvdtrain.timeline.analysis.rank_steps import stalls_of, warm_up
from hvdtrain.timeline.run import load
from tests.support.gallery import Gallery
from tests.support.launch import ROOT, train
from tests.support.sleeper import Rows


@pytest.mark.slow
def test_a_planted_straggler_is_named_with_its_cause(gallery: Gallery) -> None:
    analysis = analyse(load(gallery["late"].run))
    assert analysis.blame.late == [1], analysis.blame.reason
    assert analysis.blame.causes[1][0].name == "forward"
    assert "straggler" in {finding.kind for finding in analysis.findings}


@pytest.mark.parametrize("name", ["two", pytest.param("late", marks=pytest.mark.slow), "resumed"])
def test_the_budget_of_a_step_sums_to_its_wall_time(name: str, gallery: Gallery) -> None:
    """Its parts, over the steps that it is of, against the journal, whose times are taken some instructions later.

    A busy machine may stop the rank between the two for a few slices of time, once at each end of a start.
    """
    run = load(gallery[name].run)
    budget, steps = analyse(run).budget, read_steps(run.path / "journal.jsonl")
    assert budget is not None
    wall_ms, count = 0.0, 0
    for index, table in run.stamped:
        used = [int(step) for step in table.step[warm_up(table) :] if step not in stalls_of(run.starts[index])]
        wall_ms += 1e3 * (steps[used[-1]]["time"] - steps[used[0] - 1]["time"])
        count += used[-1] - used[0] + 1
    assert budget.steps <= count and len(run.stamped) == 1 + (name == "resumed")
    assert count * sum(part.ms.value for part in budget.parts) == pytest.approx(wall_ms, rel=0.02, abs=100)


@pytest.mark.slow
def test_stamps_have_what_a_rank_was_late_by_and_its_batches(tmp_path: Path) -> None:
    """Rank 1 sleeps while it reads data and while garbage is collected: never less than asked for, on any machine."""
    options = ("--step_ms=10", "--late_rank=1", "--late_ms=100", "--late_in=data,gc,length", "--train.steps=20")
    more = ("--train.global_batch=2", "--train.micro_batch=1", "--checkpoint.every=0", "--run_dir=run")
    train(f"--task={ROOT}/tests/support/sleeper.py:sleeper", *options, *more, size=2, cwd=tmp_path)
    stamps = load(tmp_path / "run").steps
    assert stamps is not None and len(stamps.step) >= 16
    for part in ("data", "gc"):
        assert (stamps.parts_us[part][1] >= 1e5).all() and stamps.parts_us[part][0].min() < 1e5
    lengths = {len(Rows(ragged=True)[index]) for index in range(64)}
    assert {*stamps.elements.flat} <= lengths and len({*stamps.elements.flat}) > 16
