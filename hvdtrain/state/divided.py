"""Tensors that torch has divided among ranks by rows: DTensors, as FSDP makes them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hvdtrain.state.pieces import Place

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_divided(tensor: object) -> TypeIs[DTensor]:
    """Return whether a tensor is divided among ranks."""
    # Not imported: that takes most of a second, and where nobody has imported it, there are none.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return the rows that this rank holds, in the same memory; of other tensors, all."""
    if not is_divided(tensor):
        return tensor
    with torch.no_grad():
        rows: Tensor = tensor.to_local()
        return rows.detach()


def place_of(tensor: DTensor) -> Place:
    """Return the place of this rank's rows: torch gives each rank the same number of rows, the last ones fewer."""
    rank, size = tensor.device_mesh.get_local_rank(), tensor.device_mesh.size()
    assert tensor.device_mesh.ndim == 1 and tensor.placements[0].is_shard(0)
    first = min(rank * -(-len(tensor) // size), len(tensor))
    return Place(tuple(tensor.shape), (first, *[0] * (tensor.dim() - 1)), _ranks_at(tensor, range(rank, rank + 1)))


def ranks_with_rows(tensor: DTensor) -> tuple[int, ...]:
    """Return the ranks that hold rows."""
    return _ranks_at(tensor, range(-(-len(tensor) // -(-len(tensor) // tensor.device_mesh.size()))))


def _ranks_at(tensor: DTensor, indices: range) -> tuple[int, ...]:
    """Return the ranks with these indices in their group; each group of consecutive ranks divides the tensor."""
    from torch.distributed import get_world_size

    size = tensor.device_mesh.size()
    return tuple(rank for rank in range(get_world_size()) if rank % size in indices)


def take_rows(tensor: Tensor, divided: Tensor | None) -> Tensor:
    """Return a whole tensor, or this rank's rows of it as a DTensor if `divided` is one. The rows are copies.

    A tensor that has the shape of this rank's rows already is these rows.
    """
    if not is_divided(divided):
        return tensor
    from torch.distributed.tensor import DTensor

    own = local(divided)
    if tensor.shape != own.shape:
        tensor = place_of(divided).cut(tensor, own.shape).clone()  # without the memory of the other rows
    placed = tensor.to(own.device, own.dtype)
    return DTensor.from_local(
        placed, divided.device_mesh, divided.placements, run_check=False, shape=divided.shape, stride=divided.stride()
    )
