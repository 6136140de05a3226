"""The repeated parts of a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from hvdtrain.errors import ConfigError


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated parts of a model: members, with parameters, of its outermost ModuleLists and Sequentials."""
    found: list[nn.Module] = []
    waiting: list[nn.Module] = [model]
    while waiting:
        module = waiting.pop(0)
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            found += [child for child in module if any(True for _ in child.parameters())]
        else:
            waiting += module.children()
    return list(dict.fromkeys(found))


def stage_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that the stages of a pipeline divide: those that use embeddings again follow them."""
    return [block for block in blocks(model) if not getattr(block, "takes_embeddings", False)]


def outside_of_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model that are no block, and in none, by name; each before those in it."""
    within = {module for block in blocks(model) for module in block.modules()}
    return {name: module for name, module in model.named_modules() if module not in within}


def before_forward(module: nn.Module, action: Callable[[], object]) -> Callable[[], object]:
    """Call `action` before each forward pass of a module, outside of what `compile` compiled; return what ends this."""
    inner = module._compiled_call_impl
    if inner is None:
        return module.register_forward_pre_hook(lambda *_: action()).remove

    def call(*arguments: Any, **keywords: Any) -> Any:
        action()
        return inner(*arguments, **keywords)

    module._compiled_call_impl = call
    return partial(setattr, module, "_compiled_call_impl", inner)


def require_blocks(model: nn.Module, options: str, action: str, next_step: str) -> list[nn.Module]:
    """Return the blocks of a model, where `options` need them for an action.

    Errors: ConfigError: the model has no blocks.
    """
    if found := blocks(model):
        return found
    raise ConfigError(
        f"{options}, but the model has no blocks to {action}",
        expected="an nn.ModuleList or nn.Sequential of modules with parameters",
        found=type(model).__name__,
        next_step=next_step,
    )
