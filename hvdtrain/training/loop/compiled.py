"""torch.compile, block by block: a backward compiled as one graph hands over all gradients at its end, too late to
exchange them beside it.
"""

from __future__ import annotations

import torch
from torch import nn

from hvdtrain.errors import ConfigError

_VARIANTS = 8
"""Times that a block may be compiled: in training and in evaluation, and for batches of other shapes."""


def blocks(model: nn.Module) -> list[nn.Module]:
    """The parts that a model repeats: what its outermost `nn.ModuleList` and `nn.Sequential` hold, with parameters."""
    found: list[nn.Module] = []
    waiting: list[nn.Module] = [model]
    while waiting:
        module = waiting.pop(0)
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            found += [child for child in module if any(True for _ in child.parameters())]
        else:
            waiting += module.children()
    return list(dict.fromkeys(found))


def compile_blocks(model: nn.Module) -> int:
    """Compile each of `blocks` in place, its names and state as they were; how many. They are compiled when first used.

    Raises torch's limits on how often one function is compiled, which are the process's, where the blocks may need it.

    Errors:
        ConfigError: the model has none.
    """
    found = blocks(model)
    if not found:
        raise ConfigError(
            "--train.compile true, but the model has no blocks to compile",
            expected="an nn.ModuleList or nn.Sequential of modules with parameters",
            found=type(model).__name__,
            next_step="call .compile() on the parts of the model in the task, or leave --train.compile false",
        )
    _make_room(len(found) * _VARIANTS)
    for block in found:
        _compile(block)
    return len(found)


def _make_room(count: int) -> None:
    """Let one function be compiled `count` times.

    Unlike blocks of one class (other widths, strides, an index of the layer) share one function. At 8 variants of it,
    evaluation's included, torch would leave the rest of the blocks uncompiled.
    """
    import torch._dynamo.config as limits  # takes seconds

    limits.recompile_limit = max(limits.recompile_limit, count)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, count)


def _compile(block: nn.Module) -> None:
    """Compile the forward itself where it is torch's own (`nn.Sequential`): `nn.Module.compile` passes it over."""
    if type(block).forward.__module__.startswith("torch.nn."):
        block.forward = torch.compile(block.forward)
    else:
        block.compile()
