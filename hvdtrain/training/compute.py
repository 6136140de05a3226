"""How much a run computes: FLOPs of a sample, and what its devices could do at most."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.config.schema import Config
from hvdtrain.observe.flops import FlopCount, peak_tflops
from hvdtrain.task.base import Task

_BACKWARD = 2
"""Backward computes the gradients of inputs and of weights: twice what forward does."""

Loss = Callable[[nn.Module, Any], tuple[Tensor, Tensor | float]]


def with_flops_counted(
    task: Task, config: Config, device: torch.device, size: int, tell: Callable[[dict[str, Any]], None]
) -> Task:
    """The task, whose first forward pass in training is counted on the way: no pass more is run.

    Args:
        task: its `loss` is replaced.
        config: precision, samples of a pass, and the peak where the user has said it.
        device: of this rank.
        size: number of ranks.
        tell: takes the event ``flops``, once: ``per_sample``, FLOPs of training on a sample; ``device``;
            ``peak_per_s`` of all ranks together and ``peak_source``, None where that is not known. It is not called
            where nothing could be counted.
    """

    def counted(flops: int) -> None:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        own = config.observe.peak_tflops
        tf32 = torch.get_float32_matmul_precision() != "highest"
        known = (own, "--observe.peak_tflops") if own else peak_tflops(name, config.precision, tf32=tf32)
        tell(
            {
                "event": "flops",
                "per_sample": (1 + _BACKWARD) * flops / config.train.micro_batch,
                "device": name,
                "peak_per_s": known[0] * 1e12 * size if known else None,
                "peak_source": known[1] if known else None,
            }
        )

    return replace(task, loss=_Counted(task.loss, counted))


class _Counted:
    def __init__(self, loss: Loss, tell: Callable[[int], None]) -> None:
        self._loss = loss
        self._tell: Callable[[int], None] | None = tell

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | float]:
        tell = self._tell
        if tell is None or not torch.is_grad_enabled():  # an evaluation
            return self._loss(model, batch)
        self._tell = None
        with FlopCount() as count:
            result = self._loss(model, batch)
        if count.flops:
            tell(count.flops)
        return result
