"""How close to the ideal is a step with one rank at half speed, with shares by speed and with equal ones?

2 ranks of 1 thread, the default language model, 24 micro-batches a step. Rank 1 computes each micro-batch twice. The
ideal share of rank 0 is two thirds of them: the step is then 4/3 of one without a slow rank. `balance/half_speed` is
the median step with `--parallel.balance speed` over that ideal, `balance/equal` that with equal shares (1.5 if nothing
else took time). Then rank 0 is the slow one instead, in the same jobs. `balance/turned` is `balance/half_speed`
`WARM_UP` steps later. The jobs take turns of seconds (see jobs.py).
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

from common import Figure, figure, main
from jobs import Job, Setting, take_turns, warmed_up
from step import median_step_s
from torch import Tensor, nn

from hvdtrain import Task
from hvdtrain.runtime.environment import environ, rank_info
from hvdtrain.task.language_model import language_model

TURN_S, WARM_UP = 15.0, 24
IDEAL = 4 / 3
TURNED = "BENCHMARK_TURNED"
"""Variable with the path of a file: once it exists, the other rank is slow."""


def half_speed() -> Task:
    """The default task; rank 1, or later rank 0, computes each loss twice."""
    task = language_model()
    rank, turned = rank_info(environ()).rank, Path(os.environ[TURNED])

    def twice(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | float]:
        if not model.training or rank != (0 if turned.exists() else 1):
            return task.loss(model, batch)
        (first, weight), (second, _) = task.loss(model, batch), task.loss(model, batch)
        return (first + second) / 2, weight

    return replace(task, loss=twice)


def settings(turned: Path) -> dict[str, Setting]:
    slow = Setting("balance:half_speed", 2, passes=12, variables={TURNED: str(turned)})
    by_speed = replace(slow, ours={"parallel.balance": "speed"})
    return {"even": Setting("default", 2, passes=12), "equal": slow, "speed": by_speed}


def over_ideal(jobs: dict[str, Job], rounds: int) -> dict[str, list[float]]:
    """The median step of each job over the ideal one, round by round."""
    seconds = take_turns(jobs, partial(median_step_s, turn_s=TURN_S), rounds)
    return {name: [a / (IDEAL * b) for a, b in zip(own, seconds["even"], strict=True)] for name, own in seconds.items()}


def measure(quick: bool) -> list[Figure]:
    rounds = 2 if quick else 5
    with tempfile.TemporaryDirectory() as scratch:
        turned = Path(scratch) / "turned"
        starts = {name: partial(Job, "ours", setting) for name, setting in settings(turned).items()}
        with warmed_up(starts, WARM_UP) as jobs:
            before = over_ideal(jobs, rounds)
            turned.touch()
            for job in jobs.values():
                most = len(job.steps()) + WARM_UP
                job.until(lambda seen, most=most: len(seen) >= most)
            after = over_ideal(jobs, rounds)
    return [
        figure("balance/half_speed", before["speed"], "ratio"),
        figure("balance/equal", before["equal"], "ratio"),
        figure("balance/turned", after["speed"], "ratio"),
        figure("balance/turned/equal", after["equal"], "ratio"),
    ]


if __name__ == "__main__":
    main(__doc__, measure)
