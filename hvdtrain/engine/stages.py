"""What can be a stage of a pipeline, and the loss of a rank that has one. See `engine.pipeline`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.comm.dimensions import Dimensions
from hvdtrain.engine.blocks import blocks
from hvdtrain.engine.sequence import dropout_of
from hvdtrain.errors import ConfigError, TaskError
from hvdtrain.task.base import Task


class EndOfStage(BaseException):
    """Ends a forward pass after the last block of a rank. No error: code of the task must not catch it."""


def end_with_stage(task: Task, dimensions: Dimensions) -> Task:
    """Return a task with a loss of 0, weight 0 and no metrics on ranks where the pass ends before the loss.

    Its functions raise a TaskError if they run the model more than once.
    """
    if dimensions.pp == 1:
        return task
    runs = 0

    def count(*_: object) -> None:
        nonlocal runs
        runs += 1
        if runs > 1:
            raise TaskError(
                f"{dimensions.options} does not support a task that runs the blocks of the model more than once",
                expected="one forward pass in the loss function, one in the metrics function, and no activation"
                " checkpointing but --memory.checkpointing",
                next_step="leave out --parallel.pp",
            )

    for block in blocks(task.model)[:1]:
        block.register_forward_pre_hook(count, prepend=True)

    def on_stage(function: Callable[..., Any], at_end: Callable[[], Any], *arguments: Any) -> Any:
        nonlocal runs
        runs = 0
        try:
            return function(*arguments)
        except EndOfStage:
            return at_end()

    def no_loss() -> tuple[Tensor, float]:
        return torch.zeros((), device=next(task.model.parameters()).device), 0.0

    def no_metrics() -> dict[str, tuple[()]]:
        return dict.fromkeys(task.metric_objects, ())

    metrics = None if task.metrics is None else partial(on_stage, task.metrics, no_metrics)
    return replace(task, loss=partial(on_stage, task.loss, no_loss), metrics=metrics)


def first_blocks(model: nn.Module, blocks: list[nn.Module], count: int) -> list[int]:
    """Return the first of some blocks for each of `count` stages, and the end: stages that multiply about as much.

    A token is multiplied by all matrices of a block, but only by those of the experts that it chooses. The last stage
    also has what comes after the blocks, such as the LM head. Attention scores are left out: each block has them.
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    chosen = getattr(text, "num_experts_per_tok", None)

    def work(parameters: Iterable[nn.Parameter]) -> float:
        sizes = ((p.numel(), p.shape[0], p.dim()) for p in parameters)
        return sum(
            size * min(1.0, (chosen or first) / first) if dims == 3 else size for size, first, dims in sizes if dims > 1
        )

    inside = {parameter for block in blocks for parameter in block.parameters()}
    works = [work(block.parameters()) for block in blocks]
    works[-1] += work(
        parameter
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
        if parameter not in inside
    )
    return _divide_evenly(works, count)


def _divide_evenly(works: Sequence[float], count: int) -> list[int]:
    """Divide consecutive works into `count` parts, none of them empty: the largest one as small as possible.

    Of several such divisions, the one with the smallest sum of squares. Returns the starts of the parts, and the end.
    """
    before = [0.0, *accumulate(works)]
    nothing: tuple[float, float, list[int]] = (math.inf, math.inf, [])
    best = [(0.0, 0.0, [0]), *[nothing] * len(works)]  # of the works up to each end
    for part in range(1, count + 1):
        found = [nothing] * part
        for end in range(part, len(works) + 1):
            options = []
            for start in range(part - 1, end):
                largest, squares, starts = best[start]
                own = before[end] - before[start]
                options.append((max(largest, own), squares + own * own, [*starts, end]))
            found.append(min(options))
        best = found
    return best[-1][2]


def stages_of(
    model: nn.Module, blocks: list[nn.Module], firsts: list[int], option: str
) -> dict[nn.Parameter, tuple[int, ...]]:
    """Return the stages of each parameter: `firsts` are the first blocks of the stages, and the end.

    Embeddings that are used after the blocks, too, are on the first stage and the last one: where the LM head has the
    same parameter, or a module after the blocks says that it gets embeddings, by `takes_embeddings`.

    Errors:
        ConfigError: parameters before the blocks are not those of embeddings, or blocks have a parameter of others.
    """
    last = len(firsts) - 2
    found: dict[nn.Parameter, tuple[int, ...]] = {}
    for stage, (begin, end) in enumerate(pairwise(firsts)):
        for block in blocks[begin:end]:
            found |= dict.fromkeys(block.parameters(), (stage,))
    uses: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            uses.setdefault(parameter, []).append((f"{prefix}.{name}" if prefix else name, module))
    takes_embeddings = any(getattr(module, "takes_embeddings", False) for module in model.modules())
    is_before = True
    for parameter, named in uses.items():
        (name, module), *others = named
        is_embedding = isinstance(module, nn.Embedding)
        if others and (parameter in found or not (is_before and is_embedding)):
            raise ConfigError(
                f"{option} does not support {name} and {others[0][0]}, which are one parameter",
                expected="one parameter only for an embedding and for what follows the blocks, such as the LM head",
                next_step="use another model, or leave out --parallel.pp",
                everywhere=True,
            )
        if parameter in found:
            is_before = False
            continue
        found[parameter] = (last,)
        if is_before:
            is_after = takes_embeddings or any(not isinstance(module, nn.Embedding) for _, module in others)
            found[parameter] = (0, last) if is_after else (0,)
        if is_before and not is_embedding:
            raise ConfigError(
                f"{option} does not support {name}, a parameter before the blocks",
                expected="only nn.Embedding before the blocks",
                next_step="leave out --parallel.pp",
                everywhere=True,
            )
    return found


def refuse_what_has_no_stages(model: nn.Module, option: str) -> None:
    """Check that stages would compute what one rank computes.

    Errors:
        ConfigError: not with blocks that are skipped at random, or running statistics.
    """
    for name, value in dropout_of(model).items():
        if "layerdrop" in name:
            raise ConfigError(
                f"{option} does not support skipping blocks at random, which {name} sets",
                expected="a probability of 0",
                found=f"{value:g}",
                next_step="leave out --parallel.pp",
                everywhere=True,
            )
    for name, parameter in model.named_parameters():
        if not parameter.dim():
            raise ConfigError(
                f"{option} does not support {name}, a parameter without dimensions",
                expected="one dimension or more, such as torch.ones(1)",
                next_step="leave out --parallel.pp",
                everywhere=True,
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
            raise ConfigError(
                f"{option} does not support running statistics, which {name} has",
                expected="norms of each sample, such as nn.LayerNorm",
                next_step="leave out --parallel.pp",
                everywhere=True,
            )
