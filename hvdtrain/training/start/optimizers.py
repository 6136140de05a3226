"""The optimizer of the options, its learning rates and step counts, and where torch's fused optimizers are right.

Fused kernels ignore strides, and treat memory as rows of elements.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer

from hvdtrain.config.schema import OptimizerConfig, TrainConfig
from hvdtrain.engine.blocks import require_blocks
from hvdtrain.engine.divisible import sparse_gradients
from hvdtrain.errors import ConfigError, TaskError
from hvdtrain.muon import Muon
from hvdtrain.training.loop.forward import describe


def why_not_fused(parameters: Iterable[tuple[str, nn.Parameter]], sparse: Collection[nn.Parameter] = ()) -> str:
    """Return why fused kernels cannot update these named parameters, as an end of a sentence; "" if they can.

    `sparse`: those with sparse gradients.
    """
    for name, parameter in parameters:
        if parameter in sparse:
            return f"{name} has sparse gradients, which torch's fused kernels do not support"
        if not parameter.is_floating_point() or parameter.device.type not in ("cpu", "cuda"):
            return f"{name} has {parameter.dtype} on {parameter.device}, which torch's fused kernels do not support"
        # Not contiguous in some order of dimensions.
        if parameter.stride() != torch.empty_like(parameter, device="meta").stride():
            return (
                f"{name} of shape {tuple(parameter.shape)} and strides {parameter.stride()} does not fill its memory,"
                " and torch's fused kernels would change other elements"
            )
    return ""


def check_own_optimizer(optimizer: Optimizer, model: nn.Module, *, may_fuse: bool = True) -> None:
    """Check that a task's optimizer, if it is fused, updates what it should; `may_fuse`: as of `make_optimizer`.

    Errors: TaskError: it would not. torch itself raises no error.
    """
    fused = {p for group in optimizer.param_groups if group.get("fused") for p in group["params"]}
    if fused and not may_fuse:
        raise TaskError(
            f"--train.reproducible bits: the task's optimizer is {type(optimizer).__name__}(fused=True), but torch's"
            " fused kernels on CPUs round the last elements of a tensor, or of a rank's part of it, in another way",
            expected="an update of each element that does not depend on how ranks divide tensors",
            next_step="fused=False, or leave out --train.reproducible",
        )
    own = type(optimizer).__module__.startswith("torch.optim.")
    named = [(name, p) for name, p in model.named_parameters() if own and p in fused]
    if reason := why_not_fused(named, sparse_only(model)):
        raise TaskError(
            f"the task's optimizer is {type(optimizer).__name__}(fused=True), but {reason}",
            expected="parameters that are contiguous in some order of their dimensions, with dense gradients",
            next_step="fused=False; or make the parameter of a copy: nn.Parameter(tensor.contiguous())",
        )


def sparse_only(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return `sparse_gradients` of parameters to train that no other module uses, which would make them dense."""
    found = sparse_gradients(model)
    every = [m for m in model.modules() if getattr(m, "sparse", None) is not True]
    dense = {p for module in every for p in module.parameters(recurse=False)}
    return {p: name for p, name in found.items() if p.requires_grad and p not in dense}


OPTIMIZERS: Mapping[str, tuple[Callable[..., Optimizer], tuple[str, ...]]] = {
    "adamw": (torch.optim.AdamW, ("betas", "eps", "fused")),  # Loshchilov and Hutter, 2019
    "sgd": (torch.optim.SGD, ("momentum", "fused")),
    "muon": (Muon, ("momentum", "betas", "eps", "fused")),  # Jordan et al., 2024
    "adafactor": (torch.optim.Adafactor, ()),  # Shazeer and Stern, 2018
}
"""By `OptimizerConfig.name`: its class, and which arguments it takes besides groups of parameters and `lr`."""


def make_optimizer(model: nn.Module, config: OptimizerConfig, *, may_fuse: bool = True) -> Optimizer:
    """Make the optimizer of the options over the model's parameters that require a gradient.

    `may_fuse`: whether an element may be rounded by its place in a tensor, as torch's fused kernels on CPUs do.

    Weight decay applies only to parameters of two or more dimensions, not to norms and biases, nor to parameters with
    sparse gradients.

    Errors: ConfigError: the optimizer is Muon, and no parameter to train is a matrix of a block; or there are sparse
    gradients, and it is not SGD.
    """
    sparse = sparse_only(model)
    if sparse and config.name != "sgd":
        raise ConfigError(
            f"--optimizer.name {config.name}, but {next(iter(sparse.values()))} makes sparse gradients",
            expected="--optimizer.name sgd for sparse gradients, or nn.Embedding(sparse=False)",
            next_step="choose one of these; or an optimizer of the task: torch.optim.Adagrad, or torch.optim.SparseAdam"
            " if all gradients are sparse",
        )
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trained if p.dim() >= 2 and p not in sparse]
    matrices = _matrices(model) if config.name == "muon" else set()
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p in matrices], "weight_decay": config.weight_decay, "matrices": True},
        {"params": [p for p in decayed if p not in matrices], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() < 2 or p in sparse], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    # One pass over memory instead of ten.
    fused = may_fuse and not why_not_fused(
        ((name, p) for name, p in model.named_parameters() if p.requires_grad), sparse
    )
    options = {"betas": (config.beta1, config.beta2), "eps": config.eps, "momentum": config.momentum, "fused": fused}
    kind, takes = OPTIMIZERS[config.name]
    return kind(groups, lr=config.peak_lr, **{name: options[name] for name in takes})


def _matrices(model: nn.Module) -> set[nn.Parameter]:
    """Return the matrices of the model's blocks, and its stacks of matrices, as of experts.

    Biases, embeddings, weights of convolutions, complex ones, and what is also used outside of blocks are none.
    """
    without = "--optimizer.name adamw"
    found = require_blocks(model, "--optimizer.name muon", "take matrices from", without)
    inside = {module for block in found for module in block.modules()}
    matrices: set[nn.Parameter] = set()
    others: set[nn.Parameter] = set()
    for module in model.modules():
        is_other = module not in inside or isinstance(module, (nn.Embedding, nn.EmbeddingBag, _ConvNd))
        for name, parameter in module.named_parameters(recurse=False):
            is_matrix = parameter.dim() in (2, 3) and not parameter.is_complex()
            (matrices if is_matrix and not is_other and "bias" not in name else others).add(parameter)
    if not any(parameter.requires_grad for parameter in matrices - others):
        raise ConfigError(
            "--optimizer.name muon, but the blocks of the model have no matrix to train",
            expected="parameters of 2 dimensions, or of 3 for experts, that are not of embeddings or convolutions",
            found=f"{len(found)} blocks, the first is {type(found[0]).__name__}",
            next_step=without,
        )
    return matrices - others


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


def total_steps(config: TrainConfig, samples: int) -> int:
    """Return the schedule's horizon: `steps`, or the number of steps in `epochs` epochs of `samples` samples.

    Errors: ConfigError: there are `epochs`, but the number of samples is not known, 0.
    """
    if config.epochs is None:
        return config.steps
    if not samples:
        raise ConfigError(
            "--train.epochs cannot be used with an iterable data set",
            expected="--train.steps, because the number of its samples is not known",
            found=f"--train.epochs {config.epochs:g}",
        )
    return max(1, math.ceil(config.epochs * samples / config.global_batch))


def stop_step(config: TrainConfig, horizon: int) -> int:
    """Return the step to stop at: `stop_at` or the horizon, whichever is earlier."""
    return min(horizon, config.stop_at or horizon)


def _done(given: OptimizerConfig, step: int, horizon: int) -> float:
    """Return the fraction of the steps after the warm-up."""
    return min(1.0, (step - given.warmup_steps) / max(1, horizon - given.warmup_steps))


SCHEDULES: Mapping[str, Callable[[OptimizerConfig, int, int], float]] = {
    "cosine": lambda given, step, horizon: 0.5 * (1 + math.cos(math.pi * _done(given, step, horizon))),
    "linear": lambda given, step, horizon: 1 - _done(given, step, horizon),
    "wsd": lambda given, step, horizon: max(0.0, min(1.0, (horizon - step) / max(1.0, given.decay * horizon))),
    "constant": lambda given, step, horizon: 1.0,
}
"""By `OptimizerConfig.schedule`: from 1 to 0 between the peak and the final learning rate, after the warm-up.

Hu et al., "MiniCPM", 2024, for wsd.
"""


def lr_schedule(config: OptimizerConfig, horizon: int) -> Callable[[int], float]:
    """Return the factor on the learning rate as a function of the step, counted from 0."""
    schedule = SCHEDULES[config.schedule]

    def at(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / (config.warmup_steps + 1)
        return config.min_lr + (1 - config.min_lr) * schedule(config, step, horizon)

    return at


def task_schedule(schedule: Callable[..., float], horizon: int) -> Callable[[int], float]:
    """Return a task's schedule as a function of the step; it may also take the number of steps.

    Errors: TaskError where the schedule returns no number.
    """
    required = []
    with suppress(ValueError):  # a function of C
        parameters = inspect.signature(schedule).parameters.values()
        required = [p for p in parameters if p.default is p.empty and p.kind <= p.POSITIONAL_OR_KEYWORD]

    def at(step: int) -> float:
        factor: Any = schedule(step, horizon) if len(required) > 1 else schedule(step)
        try:
            if isinstance(factor, (str, bytes)):
                raise TypeError
            return float(factor)  # numpy's numbers are not JSON's
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise TaskError(
                f"the task's schedule returned an invalid value for step {step}",
                expected="a number",
                found=describe(factor),
            ) from None

    return at
