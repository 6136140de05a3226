"""Law 8 on real jobs whose compute is sleep: the budget sums, and a planted straggler is named with its cause.

By how much it is said to be late, and that nobody is named without one, is measured by benchmarks/straggler.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.observe.past_journal import read_steps
from hvdtrain.timeline.analysis.analyse import analyse
from hvdtrain.timeline.run import load
from tests.support.gallery import Gallery
from tests.support.launch import ROOT, train


def _named(folder: Path, late: int, cause: str) -> None:
    analysis = analyse(load(folder))
    assert analysis.blame.late == [late], analysis.blame.reason
    assert analysis.blame.causes[late][0].name == cause
    assert "straggler" in {finding.kind for finding in analysis.findings}


def test_a_planted_straggler_is_named_with_its_cause(gallery: Gallery) -> None:
    _named(gallery["late"].run, 1, "forward")


@pytest.mark.parametrize("name", ["two", "late", "resumed"])
def test_the_budget_of_a_step_sums_to_its_wall_time(name: str, gallery: Gallery) -> None:
    """Its parts, over the steps that it is of, against the journal, whose times are taken some instructions later.

    A busy machine may stop the rank between the two for a few slices of time, once at each end.
    """
    run = gallery[name].run
    budget, steps = analyse(load(run)).budget, read_steps(run / "journal.jsonl")
    assert budget is not None
    last = max(steps)
    wall_ms = 1e3 * (steps[last]["time"] - steps[last - budget.steps]["time"])
    assert budget.steps * sum(part.ms.value for part in budget.parts) == pytest.approx(wall_ms, rel=0.01, abs=100)


@pytest.mark.slow
def test_of_four_ranks_one_that_is_late_in_reading_data_is_named(tmp_path: Path) -> None:
    task = f"--task={ROOT}/tests/support/sleeper.py:sleeper"
    slow = ("--step_ms=300", "--late_rank=2", "--late_ms=600", "--late_in=data")
    options = ("--train.steps=25", "--train.global_batch=4", "--train.micro_batch=1", "--checkpoint.every=0")
    train(task, *slow, *options, "--run_dir=run", size=4, cwd=tmp_path)
    _named(tmp_path / "run", 2, "data")
