"""What engines share that divide parameters among ranks: what can be divided, and the optimizer of the owned part."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.errors import ConfigError
from hvdtrain.state.train_state import Owned

BY_ELEMENT = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
"""Optimizers of torch that update each element by itself. Others may need whole tensors."""


def updates_by_element(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is known to update each element by itself, so that it may have rows of tensors."""
    kind = type(optimizer)
    return f"{kind.__module__}.{kind.__qualname__}" in {f"torch.optim.{n.lower()}.{n}" for n in BY_ELEMENT}


def refuse_what_cannot_be_divided(model: nn.Module, named: list[tuple[str, nn.Parameter]]) -> None:
    """Check that no two parameters share memory, and that gradients are dense.

    Errors:
        ConfigError: the model cannot be divided.
    """
    by_address: dict[int, str] = {}
    for name, parameter in named:
        if parameter.numel() and (other := by_address.setdefault(parameter.data_ptr(), name)) != name:
            raise ConfigError(
                f"{other} and {name} are two parameters in the same memory",
                expected="one parameter under two names",
                next_step="assign the same nn.Parameter to both modules, or --parallel.engine horovod"
                " --parallel.shard none",
            )
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True and any(True for _ in module.parameters(recurse=False)):
            raise ConfigError(
                f"{name} makes sparse gradients, which cannot be divided among ranks",
                expected="nn.Embedding(sparse=False)",
                next_step="or --parallel.engine horovod --parallel.shard none",
            )


def use_owned(optimizer: Optimizer, names: Mapping[nn.Parameter, str], owned: Mapping[str, Owned]) -> None:
    """Let the optimizer's groups contain what this rank owns of the parameters in `names`, with its state of that."""
    for group in optimizer.param_groups:
        kept = []
        for parameter in group["params"]:
            if parameter not in names:  # owned already
                kept.append(parameter)
                continue
            own, state = owned.get(names[parameter]), optimizer.state.pop(parameter, {})
            if own is not None and own.parameter is not None:
                kept.append(own.parameter)
                if state:  # made by the optimizer before the first step
                    optimizer.state[own.parameter] = {
                        slot: own.cut(value).clone() if isinstance(value, Tensor) else value
                        for slot, value in state.items()
                    }
        group["params"] = kept
