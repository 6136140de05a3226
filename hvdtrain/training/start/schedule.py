"""Learning rates and step counts as pure functions of the config."""

from __future__ import annotations

import math
from collections.abc import Callable

from hvdtrain.config.schema import OptimizerConfig, TrainConfig


def total_steps(config: TrainConfig, samples: int) -> int:
    """Return the schedule's horizon: `steps`, or the number of steps in `epochs` passes over `samples`."""
    if config.epochs is None:
        return config.steps
    return max(1, math.ceil(config.epochs * samples / config.global_batch))


def stop_step(config: TrainConfig, horizon: int) -> int:
    """Return the step to stop at: `stop_at` or the horizon, whichever is earlier."""
    return min(horizon, config.stop_at or horizon)


def lr_schedule(config: OptimizerConfig, horizon: int) -> Callable[[int], float]:
    """Return the factor on the learning rate as a function of the step, counted from 0."""

    def at(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / (config.warmup_steps + 1)
        if config.schedule == "constant":
            return 1.0
        if config.schedule == "wsd":
            left = (horizon - step) / max(1.0, config.decay * horizon)
            return config.min_lr + (1 - config.min_lr) * max(0.0, min(1.0, left))
        done = (step - config.warmup_steps) / max(1, horizon - config.warmup_steps)
        return config.min_lr + (1 - config.min_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    return at
