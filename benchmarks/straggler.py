"""Is a planted straggler named, at what cost, and is nobody named where none is planted?

Jobs of 2 and 4 ranks whose compute is sleep, 300 ms a step; one rank sleeps 30 ms longer in its forward pass or in
reading data, or none does. Figures: the share of runs in which exactly the planted rank was named (with its cause), or
nobody; and the stated cost over what the step would be shorter by without the planted sleep.
"""

from __future__ import annotations

import tempfile
from itertools import product
from pathlib import Path

from common import Figure, figure, main

from hvdtrain.timeline.analysis.analyse import analyse
from hvdtrain.timeline.analysis.rank_steps import from_stamps
from hvdtrain.timeline.analysis.stragglers import find_stragglers
from hvdtrain.timeline.run import load
from tests.support.launch import ROOT, train

STEP_MS, LATE_MS, STEPS = 300.0, 30.0, 25
SLEEPER = ROOT / "tests" / "support" / "sleeper.py"


def _job(folder: Path, size: int, late: str, rank: int) -> None:
    where = [f"--late_rank={rank}", f"--late_ms={LATE_MS}", f"--late_in={late}"] if late != "nobody" else []
    options = [f"--train.steps={STEPS}", f"--train.global_batch={size}", "--train.micro_batch=1"]
    options += ["--train.eval_samples=0", "--checkpoint.every=0", "--observe.tensorboard=false"]
    train(
        f"--task={SLEEPER}:sleeper", f"--step_ms={STEP_MS}", *where, *options, f"--run_dir={folder}", size=size,
        cwd=folder.parent,
    )  # fmt: skip


def _shorter_ms(folder: Path, planted: int) -> float:
    """What the mean step would be shorter by, had the planted rank not slept longer.

    On a quiet machine that is what it slept longer. Where others fill the cores, other ranks are the last now and then.
    """
    steps = load(folder).steps
    rounds = from_stamps(steps) if steps is not None else None
    assert rounds is not None
    work = find_stragglers(rounds).rounds.work_ms
    without = work.copy()
    without[planted] -= LATE_MS
    return float((work.max(axis=0) - without.max(axis=0)).mean())


def measure(quick: bool) -> list[Figure]:
    figures = []
    for size, late in product((2, 4), ("forward", "data", "nobody")):
        right, costs = [], []
        for run in range(2 if quick else 10):
            planted = (run + 1) % size
            with tempfile.TemporaryDirectory() as folder:
                _job(Path(folder) / "run", size, late, planted)
                blame = analyse(load(Path(folder) / "run")).blame
                if late == "nobody":
                    right.append(float(not blame.late))
                    continue
                right.append(float(blame.late == [planted] and blame.causes[planted][0].name == late))
                if blame.late == [planted]:
                    costs.append(blame.ranks[0].cost_ms.value / _shorter_ms(Path(folder) / "run", planted))
        name = f"straggler/{size}_ranks/{late}"
        figures.append(Figure(f"{name}/right", sum(right) / len(right), min(right), max(right), "share of runs"))
        if costs:
            figures.append(figure(f"{name}/cost", costs, "ratio"))
    return figures


if __name__ == "__main__":
    main(__doc__, measure)
