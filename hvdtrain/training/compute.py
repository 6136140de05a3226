"""How much a run computes: FLOPs of a sample, and what its devices could do at most."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from hvdtrain.config.schema import Config
from hvdtrain.observe.flops import count_flops, peak_tflops, untouched
from hvdtrain.task.base import Task
from hvdtrain.training.precision import Precision
from hvdtrain.training.step import checked_loss, to_device

log = logging.getLogger(__name__)

_BACKWARD = 2
"""Backward computes the gradients of inputs and of weights: twice what forward does."""


def describe_compute(
    task: Task, model: nn.Module, config: Config, device: torch.device, size: int
) -> dict[str, Any] | None:
    """The event ``flops``, from a forward pass over one sample. On one rank; the model is left as it was.

    Args:
        task: loss and data.
        model: on `device`.
        config: precision, and the peak where the user has said it.
        device: of this rank.
        size: number of ranks.

    Returns:
        ``per_sample``, FLOPs of training on a sample; ``device``; ``peak_per_s`` of all ranks together and
        ``peak_source``, None where that is not known. None altogether where the pass cannot be counted.
    """
    try:
        with untouched(model, device), Precision(config.precision, device).autocast():
            # What loader processes are to read is not read here first: an open file does not travel to them.
            data = task.heldout_data if config.loader.workers else task.train_data
            assert data is not None
            batch = (task.collate or default_collate)([data[0]])
            forward = count_flops(partial(checked_loss, task, model, to_device(batch, device)))
    except Exception as error:
        log.debug("FLOPs are not counted: %s: %s", type(error).__name__, error)
        return None
    if not forward:
        return None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    tf32 = torch.get_float32_matmul_precision() != "highest"
    own = config.observe.peak_tflops
    known = (own, "--observe.peak_tflops") if own else peak_tflops(name, config.precision, tf32=tf32)
    return {
        "event": "flops",
        "per_sample": (1 + _BACKWARD) * forward,
        "device": name,
        "peak_per_s": known[0] * 1e12 * size if known else None,
        "peak_source": known[1] if known else None,
    }
