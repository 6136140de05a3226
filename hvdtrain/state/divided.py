"""Tensors that torch has divided among ranks by rows or columns: DTensors."""

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
    """Return the part that this rank holds, in the same memory; of other tensors, all."""
    if not is_divided(tensor):
        return tensor
    with torch.no_grad():
        rows: Tensor = tensor.to_local()
        return rows.detach()


def place_of(tensor: DTensor) -> Place:
    """Return the place of this rank's part: torch gives each rank as many rows or columns, the last ones fewer."""
    rank, dim = tensor.device_mesh.get_local_rank(), divided_dim(tensor)
    if dim is None:
        return Place(tuple(tensor.shape), (0,) * tensor.dim(), _ranks_at(tensor, range(tensor.device_mesh.size())))
    length = tensor.shape[dim]
    offset = [0] * tensor.dim()
    offset[dim] = min(rank * -(-length // tensor.device_mesh.size()), length)
    return Place(tuple(tensor.shape), tuple(offset), _ranks_at(tensor, range(rank, rank + 1)))


def ranks_with_rows(tensor: DTensor) -> tuple[int, ...]:
    """Return the ranks that hold a part."""
    size, dim = tensor.device_mesh.size(), divided_dim(tensor)
    length = size if dim is None else tensor.shape[dim]
    return _ranks_at(tensor, range(-(-length // -(-length // size))))


def divided_dim(tensor: DTensor) -> int | None:
    """Return the dimension that is divided; None if each rank has the whole tensor."""
    assert tensor.device_mesh.ndim == 1 and not tensor.placements[0].is_partial()
    dim: int | None = getattr(tensor.placements[0], "dim", None)
    return dim if dim is None else dim % tensor.dim()


def _ranks_at(tensor: DTensor, indices: range) -> tuple[int, ...]:
    """Return the ranks with these indices in their group; each group of consecutive ranks divides the tensor."""
    from torch.distributed import get_world_size

    size = tensor.device_mesh.size()
    return tuple(rank for rank in range(get_world_size()) if rank % size in indices)


def take_rows(tensor: Tensor, divided: Tensor | None, device: torch.device | None = None) -> Tensor:
    """Return a whole tensor, or this rank's rows of it as a DTensor if `divided` is one. The rows are copies.

    A tensor that has the shape of this rank's rows already is these rows. `device`: of the rows (default: that of
    `divided`).
    """
    if not is_divided(divided):
        return tensor
    from torch.distributed.tensor import DTensor

    own = local(divided)
    if tensor.shape != own.shape:
        tensor = place_of(divided).cut(tensor, own.shape).clone()  # without the memory of the other rows
    placed = tensor.to(device or own.device, own.dtype)
    return DTensor.from_local(
        placed, divided.device_mesh, divided.placements, run_check=False, shape=divided.shape, stride=divided.stride()
    )
