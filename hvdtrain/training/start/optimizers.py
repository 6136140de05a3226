"""The optimizer of the options, its learning rates and step counts."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.config.schema import OptimizerConfig, TrainConfig


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """Make AdamW (Loshchilov and Hutter, 2019) or SGD over the model's parameters that require a gradient.

    Weight decay applies only to parameters of two or more dimensions, not to norms and biases.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    # One pass over memory instead of ten.
    fused = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") and _is_dense(p) for p in trained)
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=fused)
    assert config.name == "adamw"
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=fused)


def move_optimizer_state(optimizer: Optimizer) -> None:
    """Move an optimizer's state to the device of its parameters: Adagrad makes its state before the model is moved.

    Step counts stay on the host, as in torch, unless fused or capturable updates need them on the device.
    """
    for group in optimizer.param_groups:
        counts = bool(group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, Tensor) and (name != "step" or counts):
                    state[name] = value.to(parameter.device)


def _is_dense(parameter: nn.Parameter) -> bool:
    """Return whether the elements are contiguous in some order of dimensions; fused updates assume it."""
    return parameter.stride() == torch.empty_like(parameter, device="meta").stride()


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
