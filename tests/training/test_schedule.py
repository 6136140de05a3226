"""Learning rates and horizons as functions of the config."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hvdtrain.config.schema import OptimizerConfig, TrainConfig
from hvdtrain.training.start.optimizers import lr_schedule, make_optimizer, total_steps


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


def test_constant_stays() -> None:
    at = lr_schedule(OptimizerConfig(schedule="constant", warmup_steps=2), 10)
    assert [round(at(step), 3) for step in range(5)] == [0.333, 0.667, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(("epochs", "samples", "steps"), [(None, 5, 7), (1, 100, 10), (0.5, 100, 5), (2, 101, 21)])
def test_epochs_give_steps(epochs: float | None, samples: int, steps: int) -> None:
    assert total_steps(TrainConfig(steps=7, epochs=epochs, global_batch=10), samples) == steps


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_norms_and_biases_do_not_decay(name: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    optimizer = make_optimizer(model, OptimizerConfig(name=name, lr=0.1, weight_decay=0.5))  # type: ignore[arg-type]
    before = {n: p.clone() for n, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {"0.weight"}
