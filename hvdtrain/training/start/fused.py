"""Where torch's fused optimizers are right: their kernels ignore strides, and treat memory as rows of elements."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from hvdtrain.engine.divisible import sparse_gradients
from hvdtrain.errors import TaskError


def why_not_fused(parameters: Iterable[tuple[str, nn.Parameter]], sparse: Collection[nn.Parameter] = ()) -> str:
    """Return why fused kernels cannot update these named parameters, as an end of a sentence; "" if they can.

    `sparse`: those with sparse gradients.
    """
    for name, parameter in parameters:
        if parameter in sparse:
            return f"{name} has sparse gradients, which torch's fused kernels do not support"
        if not parameter.is_floating_point() or parameter.device.type not in ("cpu", "cuda"):
            return f"{name} has {parameter.dtype} on {parameter.device}, which torch's fused kernels do not support"
        if not _is_dense(parameter):
            return (
                f"{name} of shape {tuple(parameter.shape)} and strides {parameter.stride()} does not fill its memory,"
                " and torch's fused kernels would change other elements"
            )
    return ""


def check_own_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """Check that a task's optimizer, if it is fused, updates what it should.

    Errors:
        TaskError: it would not. torch itself raises no error.
    """
    fused = {p for group in optimizer.param_groups if group.get("fused") for p in group["params"]}
    own = type(optimizer).__module__.startswith("torch.optim.")
    named = [(name, p) for name, p in model.named_parameters() if own and p in fused]
    reason = why_not_fused(named, sparse_only(model))
    if reason:
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


def _is_dense(parameter: nn.Parameter) -> bool:
    """Return whether the elements are contiguous in some order of dimensions."""
    return parameter.stride() == torch.empty_like(parameter, device="meta").stride()
