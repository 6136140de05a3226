"""What can be a stage of a pipeline, and the loss of a rank that has one. See `engine.pipeline`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.comm.dimensions import Dimensions
from hvdtrain.engine.sequence import refuse_dropout
from hvdtrain.errors import ConfigError
from hvdtrain.task.base import Task


class EndOfStage(BaseException):
    """Ends a forward pass after the last block of a rank. No error: code of the task must not catch it."""


def end_with_stage(task: Task, dimensions: Dimensions) -> Task:
    """Return a task with a loss of 0 and weight 0 on ranks where the pass ends before the loss.

    Errors:
        ConfigError: the task has metrics, which need the whole model.
    """
    if dimensions.pp == 1:
        return task
    if task.metrics is not None:
        raise ConfigError(
            f"{dimensions.options}, but the task has metrics, and no rank has the whole model",
            expected="a task without metrics",
            next_step="leave out --parallel.pp, or --model.mtp_layers, which has a metric",
            everywhere=True,
        )

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | float]:
        try:
            return task.loss(model, batch)
        except EndOfStage:
            return torch.zeros((), device=next(model.parameters()).device), 0.0

    return replace(task, loss=loss)


def first_blocks(model: nn.Module, blocks: list[nn.Module], count: int) -> list[int]:
    """Return the first block of each of `count` stages, and the end: stages that multiply about as much.

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

    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    inside = {parameter for block in blocks for parameter in block.parameters()} | tables
    works = [work(block.parameters()) for block in blocks]
    works[-1] += work(p for p in model.parameters() if p not in inside)
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


def stages_of(model: nn.Module, blocks: list[nn.Module], firsts: list[int], option: str) -> dict[nn.Parameter, int]:
    """Return the stage of each parameter: `firsts` are the first blocks of the stages, and the end.

    Errors:
        ConfigError: parameters before the blocks are not those of embeddings.
    """
    found: dict[nn.Parameter, int] = {}
    for stage, (begin, end) in enumerate(pairwise(firsts)):
        found |= {parameter: stage for block in blocks[begin:end] for parameter in block.parameters()}
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    is_before = True
    for name, parameter in model.named_parameters():
        if parameter in found:
            is_before = False
            continue
        found[parameter] = 0 if is_before else len(firsts) - 2
        if is_before and parameter not in embeddings:
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
        ConfigError: not with tied parameters, dropout, or running statistics.
    """
    refuse_dropout(model, "--parallel.pp")
    names: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (other := names.setdefault(parameter, name)) != name:
            raise ConfigError(
                f"{option} does not support {other} and {name}, which are one parameter",
                expected="parameters of one stage",
                next_step='"tie_word_embeddings": false in the config of the model, or leave out --parallel.pp',
                everywhere=True,
            )
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
