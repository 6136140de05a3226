"""How close to the ideal is a step with one rank at half speed, with shares by speed and with equal ones?

2 ranks of 1 thread, the default language model, 24 micro-batches a step. Rank 1 computes each micro-batch twice. The
ideal share of rank 0 is two thirds of them: the step is then 4/3 of one without a slow rank. `balance/half_speed` is
the median step with `--parallel.balance speed` over that ideal, `balance/equal` that with equal shares (1.5 if nothing
else took time). The jobs take turns of seconds (see jobs.py).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from common import Figure, figure, main
from jobs import Setting, race
from step import median_step_s
from torch import Tensor, nn

from hvdtrain import Task
from hvdtrain.runtime.environment import environ, rank_info
from hvdtrain.task.language_model import language_model

TURN_S, WARM_UP = 15.0, 24
IDEAL = 4 / 3


def half_speed() -> Task:
    """The default task; rank 1 computes each loss twice."""
    task = language_model()
    if rank_info(environ()).rank != 1:
        return task

    def twice(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | float]:
        if not model.training:
            return task.loss(model, batch)
        (first, weight), (second, _) = task.loss(model, batch), task.loss(model, batch)
        return (first + second) / 2, weight

    return replace(task, loss=twice)


SETTINGS = {
    "even": Setting("default", 2, passes=12),
    "equal": Setting("balance:half_speed", 2, passes=12),
    "speed": Setting("balance:half_speed", 2, passes=12, ours={"parallel.balance": "speed"}),
}


def measure(quick: bool) -> list[Figure]:
    turn = partial(median_step_s, turn_s=TURN_S)
    seconds = race([*SETTINGS], SETTINGS, turn, rounds=2 if quick else 5, warm_up=WARM_UP)
    over = {
        name: [step_s / (IDEAL * even_s) for step_s, even_s in zip(seconds[name], seconds["even"], strict=True)]
        for name in ("speed", "equal")
    }
    return [figure("balance/half_speed", over["speed"], "ratio"), figure("balance/equal", over["equal"], "ratio")]


if __name__ == "__main__":
    main(__doc__, measure)
