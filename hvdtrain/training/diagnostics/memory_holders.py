"""Memory of a training process by its use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.config.schema import Config
from hvdtrain.engine.base import Engine
from hvdtrain.observe.failure.process_states import memory

_MIB = 1 << 20


def memory_holders(config: Config, device: torch.device, model: nn.Module, engine: Engine) -> dict[str, Any]:
    """Return what holds the memory of `device`, and the options that affect it.

    Returns {"where": "GPU's" or "host's", "mib": {name: MiB}, "micro_batch": int, "precision": str}. Shared memory
    counts once. The rest is mostly activations.
    """
    seen: set[int] = set()
    kinds: dict[str, Iterable[Tensor]] = {
        "parameters": model.parameters(),
        "buffers of the model": model.buffers(),
        "exchange buckets": engine.buffers(),
        "gradients": (p.grad for p in model.parameters() if p.grad is not None),
        "optimizer state": _state(engine.optimizer),
    }
    mib = {name: round(_bytes(tensors, device, seen) / _MIB, 1) for name, tensors in kinds.items()}
    figures = memory(device=True)
    peak = figures.get("cuda_peak") if device.type == "cuda" else figures.get("peak_rss")
    mib["the rest at most (activations)"] = round(max(0.0, (peak or 0.0) - sum(mib.values())), 1)
    return {
        "where": "GPU's" if device.type == "cuda" else "host's",
        "mib": mib,
        "micro_batch": config.train.micro_batch,
        "precision": config.precision,
    }


def _bytes(tensors: Iterable[Tensor], device: torch.device, seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        if tensor.device.type != device.type or tensor.layout != torch.strided:
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def _state(optimizer: Optimizer) -> Iterator[Tensor]:
    for slots in optimizer.state.values():
        yield from (value for value in slots.values() if isinstance(value, Tensor))
