"""The repeated parts of a model."""

from __future__ import annotations

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


def require_blocks(model: nn.Module, options: str, action: str, next_step: str) -> list[nn.Module]:
    """Return the blocks of a model, where `options` need them for an action.

    Errors:
        ConfigError: the model has no blocks.
    """
    if found := blocks(model):
        return found
    raise ConfigError(
        f"{options}, but the model has no blocks to {action}",
        expected="an nn.ModuleList or nn.Sequential of modules with parameters",
        found=type(model).__name__,
        next_step=next_step,
    )
