"""The memory of a rank by kind: parameters, buffers, exchange, gradients, state of the optimizer, and the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.engine.base import Engine
from hvdtrain.observe.failure.process_states import memory
from hvdtrain.state.divided import local

_LARGEST = 3


def memory_by_kind(device: torch.device, model: nn.Module, engine: Engine) -> dict[str, Any]:
    """Return what holds the memory of `device`: {"where": "GPU" or "host", "mib": {kind: MiB}}.

    Shared memory counts once. The rest is the peak so far without the others: mostly activations; on a host also
    Python and its libraries.
    """
    seen: set[int] = set()
    kinds: dict[str, Iterable[Tensor]] = {
        "parameters": model.parameters(),
        "buffers": model.buffers(),
        "exchange": engine.buffers(),
        "gradients": (p.grad for p in model.parameters() if p.grad is not None),
        "optimizer": (
            value for slots in engine.optimizer.state.values() for value in slots.values() if isinstance(value, Tensor)
        ),
    }
    mib = {name: round(_bytes(tensors, device, seen) / 2**20, 1) for name, tensors in kinds.items()}
    figures = memory(device=True)
    peak = figures.get("cuda_peak" if device.type == "cuda" else "peak_rss", 0.0)
    mib["activations and rest"] = round(max(0.0, peak - sum(mib.values())), 1)
    return {"where": "GPU" if device.type == "cuda" else "host", "mib": mib}


def unused_memory(device: torch.device) -> dict[str, float]:
    """Return MiB of a GPU that no tensor uses: `free` and `largest` block in torch's allocator, `outside` of torch.

    Empty on a CPU. A new tensor needs one block: many small ones do not help it (fragmentation).
    """
    if device.type != "cuda":
        return {}
    snapshot: list[dict[str, Any]] = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    segments = [segment for segment in snapshot if segment["device"] == device.index]
    free = [block["size"] for segment in segments for block in segment["blocks"] if block["state"] == "inactive"]
    available, total = torch.cuda.mem_get_info(device)
    found = {
        "free": sum(free),
        "largest": max(free, default=0),
        "outside": total - available - sum(segment["total_size"] for segment in segments),
    }
    return {name: round(size / 2**20, 1) for name, size in found.items()}


def failing_module(error: BaseException, model: nn.Module) -> str:
    """Return the name of the innermost module in the traceback of an error; empty if there is none."""
    names, found, traceback = {id(module): name for name, module in model.named_modules()}, "", error.__traceback__
    while traceback is not None:
        found = names.get(id(traceback.tb_frame.f_locals.get("self")), found)
        traceback = traceback.tb_next
    return found


def largest_parameters(model: nn.Module) -> dict[str, float]:
    """Return the MiB of the largest parameters by name, largest first."""
    mib = {name: round(_bytes([p], p.device, set()) / 2**20, 1) for name, p in model.named_parameters()}
    return dict(sorted(mib.items(), key=lambda item: -item[1])[:_LARGEST])


def _bytes(tensors: Iterable[Tensor], device: torch.device, seen: set[int]) -> int:
    """Return the bytes of storages that are not in `seen`, to which they are added."""
    total = 0
    for tensor in tensors:
        own = local(tensor)
        if own.device.type != device.type or own.layout != torch.strided:
            continue
        storage = own.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total
