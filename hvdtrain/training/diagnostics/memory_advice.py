"""Options that lower the use of memory: those that a run's engine supports and that it does not use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hvdtrain.config.schema import Config
from hvdtrain.engine.blocks import blocks
from hvdtrain.plan.plan import plan_of
from hvdtrain.plan.refusals import refusals


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
