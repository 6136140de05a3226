"""What FSDP can divide: checks of a job, its model and its optimizer before training."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from hvdtrain.comm.objects import on_rank_0
from hvdtrain.engine.blocks import require_blocks
from hvdtrain.engine.divisible import BY_ELEMENT, refuse_one_rank, refuse_what_cannot_be_divided, updates_by_element
from hvdtrain.engine.parts import EngineParts
from hvdtrain.errors import ConfigError


def elsewhere(parts: EngineParts) -> str:
    """Return options for what FSDP does not support."""
    divided = parts.plan.dimensions.divides_model
    return "--parallel.engine horovod" + ("" if divided else ", with --parallel.shard gradients if memory is short")


_METHODS = ("set_force_sum_reduction_for_comms", "set_custom_all_gather", "set_custom_reduce_scatter")
"""Methods that the engine needs, and older versions of torch lack."""


def check_fsdp(parts: EngineParts) -> None:
    """Check that FSDP can divide a model.

    Errors: ConfigError: there is one rank, or model or optimizer cannot be divided.
    """
    _check_job(parts)
    # On the rank that certainly has values: a `Placeholder` shares no memory.
    check = partial(refuse_what_cannot_be_divided, parts.model, parts.parameters)
    on_rank_0(parts.comm, check, name="divisible")
    _check_model(parts.model, parts.weights, elsewhere(parts))
    if not updates_by_element(parts.optimizer):
        raise ConfigError(
            "--parallel.engine fsdp gives each rank rows of tensors, but the optimizer may need whole tensors",
            expected=f"an optimizer of torch.optim that updates each element by itself: {', '.join(BY_ELEMENT)}",
            found=f"{type(parts.optimizer).__module__}.{type(parts.optimizer).__qualname__}",
            next_step="set updates_by_element = True in the class of your own optimizer that does; otherwise "
            + (
                "take one of these"
                if parts.plan.dimensions.divides_model
                else "--parallel.engine horovod, where --parallel.shard optimizer does not cut tensors for it"
            ),
        )


def _check_job(parts: EngineParts) -> None:
    refuse_one_rank(parts.comm, "--parallel.engine fsdp", "model", "--parallel.engine horovod --parallel.shard none")
    if lacking := [name for name in _METHODS if not hasattr(FSDPModule, name)]:
        raise ConfigError(
            "--parallel.engine fsdp needs a newer torch",
            expected=f"a torch with FSDPModule.{lacking[0]}",
            found=f"torch {torch.__version__}",
            next_step="install a newer torch, or --parallel.engine horovod",
        )


def _check_model(model: nn.Module, weights: torch.dtype | None, otherwise: str) -> None:
    found = require_blocks(model, "--parallel.engine fsdp", "divide", otherwise)
    names = {module: name for name, module in model.named_modules()}
    inside = {module: block for block in found for module in block.modules()}
    user: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    first: dict[nn.Module, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.dim():
            raise ConfigError(
                f"--parallel.engine fsdp divides parameters by rows, but {name} has no dimension",
                expected="shape (1,) or larger",
                next_step=f"make it nn.Parameter(torch.ones(1)), or {otherwise}",
            )
        if not parameter.numel() and parameter.requires_grad:
            raise ConfigError(
                f"--parallel.engine fsdp divides parameters by rows, but {name} has no elements",
                expected="parameters to train with elements",
                found=f"shape {tuple(parameter.shape)}",
                next_step=f"freeze or delete it, or {otherwise}",
            )
        if not parameter.is_contiguous():
            raise ConfigError(
                f"--parallel.engine fsdp divides parameters by rows, but {name} is not contiguous",
                expected="a contiguous parameter: not transposed, and not in the memory format channels_last",
                next_step=f"make it contiguous, or {otherwise}",
            )
        module = inside.get(model.get_submodule(name.rpartition(".")[0]), model)
        other, other_name = user.setdefault(parameter, (module, name))
        if other is not module:
            raise ConfigError(
                f"{other_name} and {name} are one parameter, in {names[other] or 'the model'} and in"
                f" {names[module] or 'the model'}",
                expected="a parameter in one block only, or only outside of blocks: each is gathered by itself",
                next_step=f"do not share it, or {otherwise}",
            )
        if not parameter.requires_grad:
            continue
        dtype = first.setdefault(module, parameter).dtype if weights is None else torch.float32
        if parameter.dtype != dtype:
            raise ConfigError(
                f"--parallel.engine fsdp sums the gradients of {names[module] or 'all parameters outside of blocks'} in"
                f" one format, but {name} has another",
                expected=f"{dtype}, as " + ("of the other parameters" if weights is None else "bf16-weights needs it"),
                found=str(parameter.dtype),
                next_step=f"cast or freeze it, or {otherwise}",
            )


def check_mesh(parts: EngineParts) -> None:
    """Check that the ranks have the dimensions of a job. Errors: ConfigError: they do not, or ranks share a GPU."""
    parts.plan.dimensions.check(parts.comm.size)
    if getattr(parts.comm, "through_host", False) and parts.plan.dimensions.experts > 1:
        raise ConfigError(
            f"{parts.plan.dimensions.options}, but ranks share a GPU",
            expected="one GPU for each rank: Gloo of torch 2.11 crashes in gathers of tensors on GPUs",
            next_step="start fewer ranks, or leave it out",
        )
