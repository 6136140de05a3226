"""Law 8 on real jobs whose compute is sleep: the budget sums, and a planted straggler is named with its cause.

By how much it is said to be late, and that nobody is named without one, is measured by benchmarks/straggler.py.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hvdtrain.observe.past_journal import read_steps
from hvdtrain.timeline.analysis.analyse import analyse
from hvdtrain.timeline.analysis.analysis import Analysis
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
@pytest.mark.flaky(reruns=2)
def test_of_four_ranks_one_that_is_late_in_reading_data_is_named(tmp_path: Path) -> None:
    task = f"--task={ROOT}/tests/support/sleeper.py:sleeper"
    slow = ("--step_ms=300", "--late_rank=2", "--late_ms=600", "--late_in=data")
    options = ("--train.steps=25", "--train.global_batch=4", "--train.micro_batch=1", "--checkpoint.every=0")
    train(task, *slow, *options, "--run_dir=run", size=4, cwd=tmp_path)
    _named(tmp_path / "run", 2, "data")


@pytest.mark.slow
@pytest.mark.flaky(reruns=2)
@pytest.mark.parametrize(("ranks", "late"), [(2, [0]), (2, [0, 1]), (4, [0, 1])])
def test_slowness_that_comes_or_moves_is_named_with_its_moment(ranks: int, late: list[int], tmp_path: Path) -> None:
    """With one late rank it comes, with two it moves from the first to the second."""
    steps, half = 80, 41
    task = f"--task={ROOT}/tests/support/sleeper.py:sleeper"
    slow = ("--step_ms=100", f"--late_rank={late[0] if len(late) > 1 else -1}", "--late_ms=100", f"--moves_at={half}")
    batch = (f"--train.global_batch={ranks}", "--train.micro_batch=1", f"--train.steps={steps}", "--checkpoint.every=0")
    train(task, *slow, *batch, "--run_dir=run", size=ranks, cwd=tmp_path)
    analysis = analyse(load(tmp_path / "run"))
    assert sorted(analysis.blame.late) == late, analysis.blame.reason
    for spell in analysis.blame.spells:
        assert abs((spell.first_step if spell.rank == late[-1] else spell.last_step + 1) - half) <= 0.05 * steps
        assert spell.cost_ms.value == pytest.approx(100, rel=0.2)
        assert analysis.blame.causes[spell.rank][0].name == "forward"
    assert sorted({spell.rank for spell in analysis.blame.spells}) == late
    assert not [finding for finding in analysis.findings if finding.kind == "jitter"]
    changes = [finding for finding in analysis.findings if finding.kind == "change"]
    assert not [each for each in changes if f"step {half - 1}" in each.text or f"step {half}" in each.text], (
        "one finding says it"
    )


@pytest.mark.slow
@pytest.mark.flaky(reruns=2)
@pytest.mark.parametrize("ranks", [2, 4])
def test_texts_of_unequal_length_are_a_matter_of_data(ranks: int, tmp_path: Path) -> None:
    task = f"--task={ROOT}/tests/support/sleeper.py:sleeper"
    slow = ("--step_ms=50", "--late_ms=100", "--late_in=length")
    batch = (f"--train.global_batch={ranks}", "--train.micro_batch=1", "--train.steps=80", "--checkpoint.every=0")
    train(task, *slow, *batch, "--run_dir=run", size=ranks, cwd=tmp_path)
    analysis = analyse(load(tmp_path / "run"))
    kinds = {finding.kind: finding for finding in analysis.findings}
    assert "batch_sizes" in kinds and not analysis.blame.late, analysis.blame.reason
    cost = kinds["batch_sizes"].cost_ms
    assert cost is not None and cost == pytest.approx(100 * (ranks - 1) / (ranks + 1), rel=0.2)


@pytest.mark.slow
@pytest.mark.flaky(reruns=2)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_is_stopped_often_is_named_with_the_reason(ranks: int, tmp_path: Path) -> None:
    task = f"--task={ROOT}/tests/support/sleeper.py:sleeper"
    slow = ("--step_ms=100", "--late_rank=1", "--late_ms=500", "--late_in=stops")
    batch = (f"--train.global_batch={ranks}", "--train.micro_batch=1", "--train.steps=80", "--checkpoint.every=0")
    train(task, *slow, *batch, "--run_dir=run", size=ranks, cwd=tmp_path)
    analysis = analyse(load(tmp_path / "run"))
    texts = [finding.text for finding in analysis.findings if finding.kind in ("straggler", "pause", "stopped")]
    assert any("rank 1" in text and "stopped for" in text for text in texts), texts


def _planted(folder: Path, ranks: int, kind: str, late_ms: int, steps: int = 60) -> Analysis:
    """Rank 1 is late in this way."""
    task = f"--task={ROOT}/tests/support/sleeper.py:sleeper"
    slow = ("--step_ms=100", "--late_rank=1", f"--late_ms={late_ms}", f"--late_in={kind}")
    batch = (f"--train.global_batch={ranks}", "--train.micro_batch=1", f"--train.steps={steps}", "--checkpoint.every=0")
    train(task, *slow, *batch, "--run_dir=run", size=ranks, cwd=folder)
    return analyse(load(folder / "run"))


@pytest.mark.slow
@pytest.mark.flaky(reruns=2)
def test_a_rank_that_is_late_in_most_steps_costs_what_they_do(tmp_path: Path) -> None:
    analysis = _planted(tmp_path, 2, "often", 100)
    assert analysis.blame.late == [1], analysis.blame.reason
    (row,) = [row for row in analysis.blame.ranks if row.rank == 1]
    assert row.cost_ms.value == pytest.approx(80, rel=0.2)


@pytest.mark.slow
@pytest.mark.flaky(reruns=2)
def test_two_late_ranks_of_four_are_both_named(tmp_path: Path) -> None:
    analysis = _planted(tmp_path, 4, "two", 200)
    assert sorted(analysis.blame.late) == [1, 2], analysis.blame.reason
    assert {causes[0].name for causes in analysis.blame.causes.values()} == {"forward"}


@pytest.mark.slow
@pytest.mark.flaky(reruns=2)
def test_seldom_pauses_are_told_with_their_steps(tmp_path: Path) -> None:
    analysis = _planted(tmp_path, 4, "seldom", 1500, steps=70)
    assert not analysis.blame.late
    (pause,) = [each for each in analysis.findings if each.kind == "pause" and "rank 1" in each.text]
    assert "paused 4 times, about every 16 steps" in pause.text, pause.text


@pytest.mark.slow
@pytest.mark.flaky(reruns=2)
def test_garbage_is_named_as_the_cause(tmp_path: Path) -> None:
    analysis = _planted(tmp_path, 2, "gc", 100)
    assert analysis.blame.late == [1] and analysis.blame.causes[1][0].name == "gc", analysis.blame


@pytest.mark.slow
@pytest.mark.flaky(reruns=2)
def test_ranks_that_share_a_core_wait_for_it(tmp_path: Path) -> None:
    """This machine has two cores for two ranks; both are bound to one of them."""
    options = ("--model.preset=tiny", "--train.steps=30", "--train.global_batch=2", "--train.micro_batch=1")
    options += ("--checkpoint.every=0", "--train.eval_samples=2", "--run_dir=run")
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        train(*options, size=2, launcher="horovodrun --gloo", cwd=tmp_path)  # mpirun would bind ranks to other cores
    finally:
        os.sched_setaffinity(0, allowed)
    analysis = analyse(load(tmp_path / "run"))
    (finding,) = [each for each in analysis.findings if each.kind == "cpu"]
    assert not analysis.blame.late and "waited for a CPU core" in finding.text, analysis.blame
