"""Divide each sequence among ranks (context parallelism): every rank has a part of the tokens of the same samples.

The model decides what the parts exchange (`Task.by_part`). Gradients are summed over all ranks, as always, so any
engine serves. torch's `context_parallel` is not used: it needs kernels of GPUs, and attention without a mask.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.comm.base import Comm
from hvdtrain.comm.dimensions import Dimensions
from hvdtrain.comm.mesh import gather_hosts
from hvdtrain.engine.token_exchange import Rows, exchange_rows, rows_among
from hvdtrain.errors import ConfigError
from hvdtrain.spans import Spans
from hvdtrain.task.base import SequencePart, Task


def divide_sequences(
    task: Task,
    comm: Comm,
    dimensions: Dimensions,
    device: torch.device,
    spans: Spans | None = None,
    *,
    by_torch: bool = False,
) -> Task:
    """Return the task with the loss over this rank's part of each sequence. Collective: yes.

    `by_torch`: whether torch has other exchanges in the same passes.

    Errors: ConfigError: the ranks do not have these dimensions, or the task has no such loss.
    """
    if dimensions.cp == 1:
        return task
    if task.by_part is None:
        raise _refused(dimensions, "cannot divide sequences", "--task language_model, or a Task with by_part")
    dimensions.check(comm.size)
    ranks = dimensions.sequence(comm.rank)
    rows = rows_among(comm, ranks, gather_hosts(comm), device, "sequences", spans, by_torch=by_torch)
    exchange = partial(_exchange, rows=rows, count=len(ranks))
    exchange = torch.compiler.disable(exchange, reason="ranks exchange")  # type: ignore[no-untyped-call]
    part = SequencePart(ranks.index(comm.rank), len(ranks), exchange)
    found = task.by_part(part)
    loss, metrics = found if isinstance(found, tuple) else (found, None)
    if task.metrics is not None and metrics is None:
        raise _refused(dimensions, "has metrics of whole sequences", "a by_part that returns the loss and the metrics")
    return replace(task, loss=loss, metrics=metrics)


def _refused(dimensions: Dimensions, why: str, expected: str) -> ConfigError:
    return ConfigError(
        f"{dimensions.options}, but the task {why}",
        expected=expected,
        next_step="leave out --parallel.cp",
        everywhere=True,
    )


def _exchange(tensor: Tensor, split: int, joined: int, *, rows: Rows, count: int) -> Tensor:
    """Send the n-th of `count` parts along dimension `split` to rank n; join those received along `joined`."""
    ones = [1] * count
    return torch.cat(exchange_rows(torch.stack(tensor.chunk(count, split)), ones, ones, rows).unbind(), joined)


def dropout_of(model: nn.Module) -> dict[str, float]:
    """Return the probabilities with which a model drops values, by the names of its modules or in its config."""
    found = {n: m.p for n, m in model.named_modules() if isinstance(m, nn.modules.dropout._DropoutNd)}
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_dict"):  # transformers also drops without a module
        unused = ("summary", "classifier")  # of heads for other tasks
        values = config.to_dict().items()
        found |= {f"config.{n}": value for n, value in values if "drop" in n and not n.startswith(unused)}
    return {name: value for name, value in found.items() if isinstance(value, float) and value}
