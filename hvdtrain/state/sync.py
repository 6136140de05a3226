"""Broadcast the state of one rank to all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import allgather_json, broadcast_json
from hvdtrain.errors import LaunchError
from hvdtrain.state.train_state import StateDict, TrainState

_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def broadcast_state(state: TrainState, comm: Comm, progress: Callable[[], None] = lambda: None, root: int = 0) -> None:
    """Copy parameters, buffers, optimizer state and progress from rank `root` to every rank. Collective: yes.

    `progress` is called after each tensor.

    Errors:
        LaunchError: on every rank, if the model of one rank has other tensors than that of `root`.
    """
    is_root = comm.rank == root
    own_state = state.state_dict()
    spec = broadcast_json(comm, _spec(own_state), name="state/spec", root=root)
    _check_same_model(_spec(own_state), spec, comm, root)
    tensors: dict[str, dict[str, Tensor]] = {}
    for group, entries in spec["tensors"].items():
        own = own_state.tensors[group] if is_root else {}
        tensors[group] = {
            name: own[name].detach().contiguous() if is_root else torch.empty(shape, dtype=_DTYPES[dtype])
            for name, (shape, dtype) in entries.items()
        }
    # As bytes, because Horovod does not support all dtypes. On the CPU, because it happens only once.
    handles = [
        comm.broadcast(tensor.cpu().reshape(-1).view(torch.uint8), name=f"state/{group}/{name}", root=root)
        for group, entries in tensors.items()
        for name, tensor in entries.items()
        if tensor.numel()
    ]
    for handle in handles:
        handle.wait()
        progress()
    if not is_root:
        state.load_state_dict(StateDict(tensors, spec["values"]))


def _spec(state: StateDict) -> dict[str, Any]:
    tensors = {
        group: {name: [list(tensor.shape), str(tensor.dtype)] for name, tensor in entries.items()}
        for group, entries in state.tensors.items()
    }
    return {"tensors": tensors, "values": dict(state.values)}


def _check_same_model(mine: dict[str, Any], wanted: dict[str, Any], comm: Comm, root: int) -> None:
    ours, theirs = (spec["tensors"]["model"] for spec in (mine, wanted))
    names = sorted(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n))
    difference = (names[0], ours.get(names[0]), theirs.get(names[0])) if names else None
    for rank, found in enumerate(allgather_json(comm, difference, name="state/same")):
        if found is not None:
            name, found_tensor, wanted_tensor = found
            raise LaunchError(
                f"the model of rank {rank} differs from that of rank {root}: {name}",
                expected=f"{wanted_tensor or 'no such tensor'} as on rank {root}",
                found=str(found_tensor or "no such tensor"),
                next_step="build the model only from the config, equal on every rank and host",
                everywhere=True,
            )
