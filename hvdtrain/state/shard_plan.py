"""Which rank writes which tensors of a checkpoint: tensors are divided among writers by bytes. Pure functions."""

from __future__ import annotations

import heapq

from torch import Tensor

from hvdtrain.state.train_state import StateDict

MIN_BYTES = 32 << 20
"""Fewer bytes are not worth a file of their own."""


def count_writers(state: StateDict, ranks: int, min_bytes: int = MIN_BYTES) -> int:
    """Return how many ranks write. These are the first ranks, from 0 on."""
    total = sum(tensor.nbytes for tensors in state.tensors.values() for tensor in tensors.values())
    return max(1, min(ranks, total // max(1, min_bytes)))


def select_shard(state: StateDict, number: int, count: int) -> StateDict:
    """Return the tensors that writer `number` of `count` writes. Every rank gets the same plan for the same shapes.

    The largest tensors are assigned first, each to the writer with the fewest bytes. A shard has no plain values.
    Groups without tensors belong to writer 0.
    """
    every = [
        (-tensor.nbytes, group, name) for group, tensors in state.tensors.items() for name, tensor in tensors.items()
    ]
    loads = [(0, writer) for writer in range(count)]
    own: dict[str, dict[str, Tensor]] = {group: {} for group in state.tensors} if number == 0 else {}
    for minus_bytes, group, name in sorted(every):
        load, writer = heapq.heappop(loads)
        heapq.heappush(loads, (load - minus_bytes, writer))
        if writer == number:
            own.setdefault(group, {})[name] = state.tensors[group][name]
    return StateDict(own, {})


def shard_file_name(group: str, number: int, count: int) -> str:
    """Return the file name of a group's tensors. `file_group` is the inverse."""
    return f"{group}.safetensors" if count == 1 else f"{group}-{number + 1:05d}-of-{count:05d}.safetensors"


def file_group(name: str) -> str:
    """Return the group of the tensors in a file."""
    stem = name.removesuffix(".safetensors")
    group, separator, rest = stem.rpartition("-of-")
    return group.rpartition("-")[0] if separator and rest.isdigit() else stem
