"""How the blocks of a model run: compiled one by one, or with activations that backward computes again.

A backward pass that is compiled as one graph yields all gradients at its end: too late to overlap their exchange.
Chen et al., Training Deep Nets with Sublinear Memory Cost, https://arxiv.org/abs/1604.06174. The checkpointing of
transformers' models is not used: it keeps nothing but the inputs of a block, and other models do not have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hvdtrain.engine.blocks import require_blocks
from hvdtrain.errors import TaskError
from hvdtrain.observe.flops import FORMULAS
from hvdtrain.training.loop.buffers import restored_on_device

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""Of the forward pass, and of its recomputation in backward."""

_LEFT = {"mm": 0, "bmm": 0, "_grouped_mm": 0, "_scaled_mm": 0, "addmm": 1, "baddbmm": 1}
_PRODUCTS = {getattr(torch.ops.aten, name): left for name, left in _LEFT.items() if hasattr(torch.ops.aten, name)}
"""Matrix products, with the position of the left matrix among their arguments."""

_VARIANTS = 8
"""How often a block may be compiled: for training, for evaluation, and for batches of other shapes."""


def compile_blocks(model: nn.Module, *, without_hooks: bool = False) -> int:
    """Compile each of `blocks` in place, at its first use; return how many. Names and state do not change.

    `without_hooks`: hooks on blocks run outside of compiled code, as those of a pipeline must.

    Raises torch's process-wide limits on how often one function is compiled, if the blocks may need it.

    Errors: ConfigError: the model has no blocks.
    """
    import torch._dynamo.config as limits  # takes seconds

    next_step = "call .compile() on the parts of the model in the task, or leave --train.compile false"
    found = require_blocks(model, "--train.compile true", "compile", next_step)
    found = [block for block in found if not isinstance(block, nn.SyncBatchNorm)]  # ranks meet in it
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


def checkpoint_blocks(model: nn.Module, mode: str) -> None:
    """Let each of `blocks` recompute its activations in backward, in place. Names and state do not change.

    Call it before `compile_blocks` and before an engine adds hooks to blocks: these are not part of the recomputation.

    `mode` is none, full, or selective: see `_is_kept`. A recomputation draws the same random numbers, and leaves
    persistent buffers as they are, such as running statistics. Without gradients nothing is recomputed.

    Errors: ConfigError: the model has no blocks.
    """
    if mode == "none":
        return
    options, next_step = f"--memory.checkpointing {mode}", "use torch.utils.checkpoint in the task, or leave it out"
    for block in require_blocks(model, options, "recompute", next_step):
        block.forward = partial(_forward, block, block.forward, mode == "selective")
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False):  # a cache would get the keys of a recomputation, too
            config.use_cache = False


def _forward(block: nn.Module, inner: Callable[..., Any], selects: bool, *arguments: Any, **keywords: Any) -> Any:
    """Run the forward pass `inner` of a block."""
    if not torch.is_grad_enabled():
        return inner(*arguments, **keywords)
    if torch.compiler.is_compiling():  # torch recomputes neither random numbers nor changes of buffers then
        select: dict[str, Any] = {"context_fn": _select} if selects else {}
        return checkpoint(inner, *arguments, use_reentrant=False, **select, **keywords)
    if selects:
        torch.clear_autocast_cache()  # each run of a block then casts its weights, as its recomputation does

    def run(keywords: dict[str, Any], *arguments: Any) -> Any:
        return inner(*arguments, **keywords)

    def contexts() -> Contexts:
        forward, recompute = _select() if selects else (nullcontext(), nullcontext())
        return forward, _recomputation(block, recompute)

    # Keywords as an argument: torch looks there for the devices with random numbers to restore.
    return checkpoint(run, keywords, *arguments, use_reentrant=False, context_fn=contexts)


@contextmanager
def _recomputation(block: nn.Module, inner: AbstractContextManager[Any]) -> Iterator[None]:
    try:
        with restored_on_device(block), inner:
            yield
    except RuntimeError as error:
        if "has been mutated" not in str(error):
            raise
        raise TaskError(
            "a block changes the result of a matrix product, convolution or attention in place, which"
            " --memory.checkpointing selective keeps for backward",
            expected="operations with a new result, such as nn.ReLU(inplace=False) after nn.Linear",
            next_step="change the model, or --memory.checkpointing full",
        ) from error


def _select() -> Contexts:
    return create_selective_checkpoint_contexts(_is_kept)  # type: ignore[no-any-return, no-untyped-call]


def _is_kept(context: Any, operation: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
    """Keep the results of matrix products, convolutions and attention, unless a product widens its input much.

    Results more than twice as wide as the rows of the input need the most memory for the work: those of a feed-forward
    network's first layer, of latent attention, or scores of attention that is not fused.
    """
    packet = getattr(operation, "overloadpacket", operation)
    if packet not in FORMULAS:
        return CheckpointPolicy.PREFER_RECOMPUTE
    if (left := _PRODUCTS.get(packet)) is not None and context.op_output.shape[-1] > 2 * arguments[left].shape[-1]:
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE
