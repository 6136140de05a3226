"""torch.compile, block by block.

A backward pass that is compiled as one graph yields all gradients at its end: too late to overlap their exchange.
"""

from __future__ import annotations

import torch
from torch import nn

from hvdtrain.engine.blocks import require_blocks

_VARIANTS = 8
"""How often a block may be compiled: for training, for evaluation, and for batches of other shapes."""


def compile_blocks(model: nn.Module, *, without_hooks: bool = False) -> int:
    """Compile each of `blocks` in place, at its first use; return how many. Names and state do not change.

    `without_hooks`: hooks on blocks run outside of compiled code, as those of a pipeline must.

    Raises torch's process-wide limits on how often one function is compiled, if the blocks may need it.

    Errors: ConfigError: the model has no blocks.
    """
    next_step = "call .compile() on the parts of the model in the task, or leave --train.compile false"
    found = require_blocks(model, "--train.compile true", "compile", next_step)
    found = [block for block in found if not isinstance(block, nn.SyncBatchNorm)]  # ranks meet in it
    import torch._dynamo.config as limits  # takes seconds

    # Different blocks of one class (other widths, strides, layer indices) share one function. After 8 variants of it,
    # including those for evaluation, torch would leave the other blocks uncompiled.
    limits.recompile_limit = max(limits.recompile_limit, len(found) * _VARIANTS)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, len(found) * _VARIANTS)
    for block in found:
        # `nn.Module.compile` skips the forward of torch's own classes, such as `nn.Sequential`.
        if without_hooks or type(block).forward.__module__.startswith("torch.nn."):
            block.forward = torch.compile(block.forward)
        else:
            block.compile()
    return len(found)
