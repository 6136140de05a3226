"""The repeated parts of a model."""

from __future__ import annotations

from torch import nn


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
