"""Who is late, on real jobs whose compute is sleep: a planted straggler is named with its cost, else nobody is.

``python -m tests.laws.test_straggler`` prints what each of ten runs of each kind says.
"""

from __future__ import annotations

import sys
import tempfile
from itertools import product
from pathlib import Path

import pytest

from hvdtrain.observe.journal import read_steps
from hvdtrain.timeline.analyse import analyse
from hvdtrain.timeline.analysing.blame import judge
from hvdtrain.timeline.analysing.rounds import from_stamps
from hvdtrain.timeline.analysis import Analysis
from hvdtrain.timeline.run import load
from tests.support.launch import train

SLEEPER = Path(__file__).parents[1] / "support" / "sleeper.py"
STEP_MS, LATE_MS, STEPS = 300.0, 30.0, 25
RUNS = 10
_FEW = [(2, "data", 0), (4, "nobody", 0)]
_ALL = [(size, late, run) for size, late in product((2, 4), ("forward", "data", "nobody")) for run in range(RUNS)]
CASES = [*_FEW, *(pytest.param(*case, marks=pytest.mark.slow) for case in _ALL if case not in _FEW)]


def _explained(folder: Path, size: int, late: str, late_rank: int) -> Analysis:
    where = [f"--late_rank={late_rank}", f"--late_ms={LATE_MS}", f"--late_in={late}"] if late != "nobody" else []
    options = [
        f"--task={SLEEPER}:sleeper",
        f"--step_ms={STEP_MS}",
        *where,
        f"--train.steps={STEPS}",
        f"--train.global_batch={size}",
        "--train.micro_batch=1",
        "--train.eval_samples=0",
        "--checkpoint.every=0",
        "--observe.tensorboard=false",
        f"--run_dir={folder}",
    ]
    train(*options, size=size, cwd=folder.parent)
    return analyse(load(folder))


@pytest.mark.parametrize(("size", "late", "run"), CASES)
def test_a_planted_straggler_is_named_with_its_cost_and_without_one_nobody_is(
    size: int, late: str, run: int, tmp_path: Path
) -> None:
    planted = (run + 1) % size
    analysis = _explained(tmp_path / "run", size, late, planted)
    blame = analysis.blame
    if late == "nobody":
        assert not blame.late and blame.reason
    else:
        assert blame.late == [planted], blame.reason
        assert blame.ranks[0].behind_ms == pytest.approx(LATE_MS, rel=0.2)
        assert blame.ranks[0].cost_ms.value == pytest.approx(_shorter(tmp_path / "run", planted), rel=0.2)
        assert blame.causes[planted][0].name == late
        assert "straggler" in {finding.kind for finding in analysis.findings}  # on full cores these cost more
    _check_budget(analysis, tmp_path / "run")


def _shorter(folder: Path, planted: int) -> float:
    """What the mean step would be shorter by, had the planted rank not slept longer, in ms.

    On a quiet machine that is what it slept longer. Where others fill the cores, other ranks are the last now and then.
    """
    steps = load(folder).steps
    assert steps is not None
    rounds = from_stamps(steps)
    assert rounds is not None
    work = judge(rounds).rounds.work_ms
    without = work.copy()
    without[planted] -= LATE_MS
    return float((work.max(axis=0) - without.max(axis=0)).mean())


def _check_budget(analysis: Analysis, folder: Path) -> None:
    """Its parts sum to the wall time of the journal, less the first steps."""
    budget = analysis.budget
    assert budget is not None
    steps = read_steps(folder / "journal.jsonl")
    wall_ms = 1e3 * (steps[STEPS]["time"] - steps[STEPS - budget.steps]["time"])
    assert budget.steps * sum(part.ms.value for part in budget.parts) == pytest.approx(wall_ms, rel=0.01)


def _table() -> None:
    for size, late in product((2, 4), ("forward", "data", "nobody")):
        for run in range(RUNS):
            with tempfile.TemporaryDirectory() as folder:
                found = _explained(Path(folder) / "run", size, late, (run + 1) % size)
            rows = ", ".join(
                f"rank {row.rank} {row.cost_ms.value:.2f} [{row.cost_ms.low:.2f} .. {row.cost_ms.high:.2f}]"
                for row in found.blame.ranks
            )
            planted = "nobody" if late == "nobody" else f"rank {(run + 1) % size} in {late}"
            print(f"{size} ranks, planted {planted}: named {list(found.blame.late) or 'nobody'}; {rows}")
            sys.stdout.flush()


if __name__ == "__main__":
    _table()
