"""The optimizer of the options."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.config.schema import OptimizerConfig


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
