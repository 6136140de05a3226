"""Learning rates and horizons as functions of the config."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from typing import Any, get_args, get_type_hints

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hvdtrain.config.schema import LEARNING_RATES, OptimizerConfig, TrainConfig
from hvdtrain.errors import TaskError
from hvdtrain.training.start.optimizers import (
    OPTIMIZERS,
    SCHEDULES,
    lr_schedule,
    make_optimizer,
    task_schedule,
    total_steps,
)


@given(st.integers(0, 50), st.integers(1, 500), st.floats(0, 1))
def test_warm_up_rises_and_cosine_falls_to_min(warmup: int, after: int, min_lr: float) -> None:
    horizon = warmup + after
    at = lr_schedule(OptimizerConfig(warmup_steps=warmup, min_lr=min_lr), horizon)
    rates = [at(step) for step in range(horizon + 1)]
    assert all(a < b for a, b in pairwise(rates[: warmup + 1]))
    assert rates[warmup] == 1.0
    assert all(a >= b for a, b in pairwise(rates[warmup:]))
    assert rates[horizon] == pytest.approx(min_lr, abs=1e-12)
    assert rates[0] > 0


@pytest.mark.parametrize(
    ("options", "horizon", "rates"),
    [
        ({"schedule": "linear", "warmup_steps": 1, "min_lr": 0.2}, 5, [0.5, 1.0, 0.8, 0.6, 0.4, 0.2]),
        ({"schedule": "constant", "warmup_steps": 2}, 10, [1 / 3, 2 / 3, 1.0, 1.0, 1.0]),
        ({"schedule": "wsd", "decay": 0.4, "warmup_steps": 0, "min_lr": 0.0}, 10, [*[1.0] * 7, 0.75, 0.5, 0.25]),
    ],
)
def test_schedules(options: dict[str, Any], horizon: int, rates: list[float]) -> None:
    at = lr_schedule(OptimizerConfig(**options), horizon)
    assert [at(step) for step in range(len(rates))] == pytest.approx(rates)


def test_the_tables_have_the_names_of_the_options() -> None:
    hints = get_type_hints(OptimizerConfig)
    assert set(get_args(hints["schedule"])) == SCHEDULES.keys()
    assert set(get_args(hints["name"])) == OPTIMIZERS.keys() == LEARNING_RATES.keys()


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (lambda step: 0.5**step, 0.125),
        (lambda step, steps: 1 - step / steps, 0.7),
        (lambda step, base=0.5: base**step, 0.125),
        (math.log, math.log(3)),  # whose parameters are unknown
        (partial(pow, 0.5), 0.125),
    ],
)
def test_the_schedule_of_a_task_may_take_the_number_of_steps(schedule: Any, expected: float) -> None:
    assert task_schedule(schedule, 10)(3) == pytest.approx(expected)


@pytest.mark.parametrize("factor", ["0.5", "fast", None, torch.ones(2)])
def test_a_schedule_that_returns_no_number_is_refused(factor: Any) -> None:
    with pytest.raises(TaskError, match="task's schedule returned an invalid value for step 3"):
        task_schedule(lambda step: factor, 10)(3)


@pytest.mark.parametrize(("epochs", "samples", "steps"), [(None, 5, 7), (1, 100, 10), (0.5, 100, 5), (2, 101, 21)])
def test_epochs_give_steps(epochs: float | None, samples: int, steps: int) -> None:
    assert total_steps(TrainConfig(steps=7, epochs=epochs, global_batch=10), samples) == steps


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_norms_and_biases_do_not_decay(name: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    optimizer = make_optimizer(model, OptimizerConfig(name=name, lr=0.1, weight_decay=0.5))  # type: ignore[arg-type]
    before = {n: p.clone() for n, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {"0.weight"}
