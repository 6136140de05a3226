"""The memory of a rank by kind: parameters, buffers, exchange, gradients, optimizer, and the rest; what lowers it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.config.schema import Config
from hvdtrain.engine.base import Engine
from hvdtrain.engine.blocks import blocks
from hvdtrain.observe.failure.process_states import memory
from hvdtrain.plan.plan import plan_of
from hvdtrain.plan.refusals import refusals
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
    names, found = {id(module): name for name, module in model.named_modules()}, ""
    for frame, _ in walk_tb(error.__traceback__):
        found = names.get(id(frame.f_locals.get("self")), found)
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


def memory_advice(
    config: Config, model: nn.Module, device: torch.device, size: int, *, elastic: bool = False
) -> list[str]:
    """Return options with their effects, the cheapest first, for a job of `size` ranks."""
    found = []
    memory, parallel, has_blocks = config.memory, config.parallel, bool(blocks(model))

    def supports(section: str, **changes: Any) -> bool:
        changed = replace(config, **{section: replace(getattr(config, section), **changes)})
        return not refusals(plan_of(changed, elastic=elastic))

    if memory.checkpointing != "full" and has_blocks:
        effect = "backward computes the activations of blocks again"
        found.append(f"--memory.checkpointing full (is {memory.checkpointing}): {effect}")
    divides_model = plan_of(config).places_model
    divides_gradients = divides_model or parallel.shard == "gradients"
    if size > 1 and not divides_gradients and supports("parallel", shard="gradients"):
        effect = f"divides gradients and the optimizer among {size} ranks"
        found.append(f"--parallel.shard gradients (is {parallel.shard}): {effect}")
    is_coded = divides_model and parallel.compression != "none"
    offloads = device.type == "cuda" and memory.offload == "none" and not is_coded
    if offloads and supports("memory", offload="optimizer"):
        found.append("--memory.offload optimizer: keeps the optimizer in the memory of the host")
    if size > 1 and has_blocks and not divides_model and supports("parallel", engine="fsdp", shard="none"):
        found.append(f"--parallel.engine fsdp: divides parameters, too, among {size} ranks")
    return found
