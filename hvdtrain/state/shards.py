"""Who writes what of a checkpoint: tensors divided by bytes over writers. Pure."""

from __future__ import annotations

import heapq

from torch import Tensor

from hvdtrain.state.train_state import StateDict

LEAST_BYTES = 32 << 20
"""Less than this is not worth a file of its own."""


def writers(state: StateDict, ranks: int, least_bytes: int = LEAST_BYTES) -> int:
    """How many of the ranks write: those from 0 on."""
    total = sum(_bytes(tensor) for tensors in state.tensors.values() for tensor in tensors.values())
    return max(1, min(ranks, total // max(1, least_bytes)))


def shard(state: StateDict, number: int, count: int) -> StateDict:
    """What writer `number` of `count` writes: the same on every rank, for tensors of the same shapes.

    The largest tensors are given out first, each to the writer with the fewest bytes so far. Plain values are in none,
    groups without tensors in that of writer 0.
    """
    every = [
        (-_bytes(tensor), group, name) for group, tensors in state.tensors.items() for name, tensor in tensors.items()
    ]
    loads = [(0, writer) for writer in range(count)]
    mine: dict[str, dict[str, Tensor]] = {group: {} for group in state.tensors} if number == 0 else {}
    for minus_bytes, group, name in sorted(every):
        load, writer = heapq.heappop(loads)
        heapq.heappush(loads, (load - minus_bytes, writer))
        if writer == number:
            mine.setdefault(group, {})[name] = state.tensors[group][name]
    return StateDict(mine, {})


def file_name(group: str, number: int, count: int) -> str:
    """The file of a group's tensors; `group_of` is its inverse."""
    return f"{group}.safetensors" if count == 1 else f"{group}-{number + 1:05d}-of-{count:05d}.safetensors"


def group_of(name: str) -> str:
    """The group whose tensors a file holds."""
    stem = name.removesuffix(".safetensors")
    group, separator, rest = stem.rpartition("-of-")
    return group.rpartition("-")[0] if separator and rest.isdigit() else stem


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize
