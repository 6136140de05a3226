"""torch.compile, block by block: a backward compiled as one graph hands over all gradients at its end, too late to
exchange them beside it.
"""

from __future__ import annotations

from torch import nn

from hvdtrain.errors import ConfigError


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
    for block in found:
        block.compile()
    return len(found)
