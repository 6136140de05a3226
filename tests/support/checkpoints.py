"""Write checkpoints without a background thread, and compare states."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvdtrain.state.checkpoint_store import CheckpointStore
from hvdtrain.state.pieces import Place, StateDict
from hvdtrain.state.shard_files import ShardedWrite, select_shard, write_shard


def bits(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, torch.Size, bytes]]:
    """What tensors are to the last bit, by name: NaNs are equal to themselves, and zeros of two signs are not."""
    plain = {name: tensor.detach().contiguous().reshape(-1) for name, tensor in tensors.items()}
    return {
        name: (t.dtype, tensors[name].shape, t.view(torch.uint8).numpy().tobytes() if t.numel() else b"")
        for name, t in plain.items()
    }


def same_state(a: StateDict, b: StateDict) -> bool:
    """Whether two states have the same tensors, bit for bit, and the same values as JSON has them."""
    values = [json.dumps(dict(state.values), sort_keys=True) for state in (a, b)]
    groups = [{group: bits(tensors) for group, tensors in state.tensors.items()} for state in (a, b)]
    return values[0] == values[1] and groups[0] == groups[1]


def save(store: CheckpointStore, step: int, state: StateDict, notes: Mapping[str, Any] | None = None) -> Path:
    """Write a checkpoint with the progress of this step, remove none, and return its path."""
    state = _at(step, state)
    write = ShardedWrite(store.begin(step, 1), step, 1, lambda: state, 0, notes or {}, None)
    return store.directory / store.write(write, store.progress, threading.Event())


def save_in_parts(store: CheckpointStore, step: int, state: StateDict, count: int, *, divided: bool) -> Path:
    """Write a checkpoint as `count` ranks do; `divided`: each has some rows of every tensor, as with FSDP."""
    folder, state = store.begin(step, 1), _at(step, state)
    files = {}
    for number in range(count):
        shard = _rows_of(state, number, count) if divided else select_shard(state, number, count)
        files |= write_shard(folder, number, count, shard, store.progress)
    return store.finish(folder, step, state, {}, files)


def _at(step: int, state: StateDict) -> StateDict:
    known = state.values.get("progress", {})
    progress = {**known, "step": step, "position": max(known.get("position", 0), step)}
    return StateDict(state.tensors, {**state.values, "progress": progress}, state.places)


def _rows_of(state: StateDict, number: int, count: int) -> StateDict:
    own: dict[str, dict[str, Any]] = {}
    places = {}
    for group, tensors in state.tensors.items():
        for name, tensor in tensors.items():
            if not tensor.dim():
                continue
            rows = -(-len(tensor) // count)
            begin = min(number * rows, len(tensor))
            part = tensor[begin : begin + rows]
            if len(part):
                own.setdefault(group, {})[name] = part
                places[group, name] = Place(tuple(tensor.shape), (begin, *[0] * (tensor.dim() - 1)), (number,))
    return StateDict(own, {}, places)
