"""Tensors that are divided among ranks: by torch, by rows or columns (DTensors), or whole on the ranks of a stage."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from hvdtrain.state.pieces import Place

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


class StageParameter(nn.Parameter):
    """A parameter that the ranks of one stage of a pipeline hold. On other ranks it has no elements: its length is 0.

    Attributes:
        whole: its shape on the ranks that hold it.
        stage: which rank of each pipeline holds it.
        ranks: of each stage; pipelines are consecutive ranks.
    """

    whole: tuple[int, ...]
    stage: int
    ranks: list[tuple[int, ...]]

    def __new__(cls, held: Tensor, whole: Sequence[int], stage: int, ranks: list[tuple[int, ...]]) -> StageParameter:
        """Return the parameter of this rank, with the memory of `held`; it has one dimension or more."""
        found: StageParameter = torch.Tensor._make_subclass(cls, held.detach(), held.requires_grad)
        found.whole, found.stage, found.ranks = tuple(whole), stage, ranks
        return found

    def like(self, held: Tensor) -> StageParameter:
        """Return another tensor that is divided like this one."""
        return StageParameter(held, self.whole, self.stage, self.ranks)

    @property
    def is_held(self) -> bool:
        """Whether this rank has the parameter."""
        return self.shape == self.whole


def is_divided(tensor: object) -> TypeIs[DTensor | StageParameter]:
    """Return whether a tensor is divided among ranks."""
    if isinstance(tensor, StageParameter):
        return True
    # Not imported: that takes most of a second, and where nobody has imported it, there are none.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def whole_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor, of all its parts together."""
    return tensor.whole if isinstance(tensor, StageParameter) else tuple(tensor.shape)


def group_size(tensor: DTensor | StageParameter) -> int:
    """Return how many ranks have all of a tensor together."""
    return len(tensor.ranks) if isinstance(tensor, StageParameter) else tensor.device_mesh.size()


def local(tensor: Tensor) -> Tensor:
    """Return the part that this rank holds, in the same memory; of other tensors, all."""
    if isinstance(tensor, StageParameter) or not is_divided(tensor):
        return tensor.detach()
    with torch.no_grad():
        rows: Tensor = cast("DTensor", tensor).to_local()
        return rows.detach()


def place_of(tensor: DTensor | StageParameter) -> Place:
    """Return the place of this rank's part: torch gives each rank as many rows or columns, the last ones fewer."""
    if isinstance(tensor, StageParameter):
        if tensor.is_held:
            return Place(tensor.whole, (0,) * tensor.dim(), tensor.ranks[tensor.stage])
        others = sorted(rank for stage, ranks in enumerate(tensor.ranks) if stage != tensor.stage for rank in ranks)
        return Place(tensor.whole, (tensor.whole[0], *(0,) * (tensor.dim() - 1)), tuple(others))
    rank, dim = tensor.device_mesh.get_local_rank(), divided_dim(tensor)
    if dim is None:
        return Place(tuple(tensor.shape), (0,) * tensor.dim(), _ranks_at(tensor, range(tensor.device_mesh.size())))
    length = tensor.shape[dim]
    offset = [0] * tensor.dim()
    offset[dim] = min(rank * -(-length // tensor.device_mesh.size()), length)
    return Place(tuple(tensor.shape), tuple(offset), _ranks_at(tensor, range(rank, rank + 1)))


def ranks_with_rows(tensor: DTensor | StageParameter) -> tuple[int, ...]:
    """Return the ranks that hold a part."""
    if isinstance(tensor, StageParameter):
        return tensor.ranks[tensor.stage]
    size, dim = tensor.device_mesh.size(), divided_dim(tensor)
    length = size if dim is None else tensor.shape[dim]
    return _ranks_at(tensor, range(-(-length // -(-length // size))))


def divided_dim(tensor: DTensor | StageParameter) -> int | None:
    """Return the dimension that is divided; None if each rank has the whole tensor."""
    if isinstance(tensor, StageParameter):
        return 0
    assert tensor.device_mesh.ndim == 1 and not tensor.placements[0].is_partial()
    dim: int | None = getattr(tensor.placements[0], "dim", None)
    return dim if dim is None else dim % tensor.dim()


def _ranks_at(tensor: DTensor, indices: range) -> tuple[int, ...]:
    """Return the ranks with these indices in their group; each group of consecutive ranks divides the tensor."""
    from torch.distributed import get_world_size

    size = tensor.device_mesh.size()
    return tuple(rank for rank in range(get_world_size()) if rank % size in indices)


def copy_of(parameter: nn.Parameter) -> Tensor:
    """Return a copy of the value, divided as the parameter is."""
    copied = parameter.detach().clone()
    return parameter.like(copied) if isinstance(parameter, StageParameter) else copied


def take_rows(tensor: Tensor, divided: Tensor | None, device: torch.device | None = None) -> Tensor:
    """Return a whole tensor, or this rank's rows of it as a DTensor if `divided` is one. The rows are copies.

    A tensor that has the shape of this rank's rows already is these rows. `device`: of the rows (default: that of
    `divided`).
    """
    if not is_divided(divided):
        return tensor
    own = local(divided)
    if tensor.shape != own.shape:
        tensor = place_of(divided).cut(tensor, own.shape).clone()  # without the memory of the other rows
    placed = tensor.to(device or own.device, own.dtype)
    if isinstance(divided, StageParameter):
        return divided.like(placed)
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        placed, divided.device_mesh, divided.placements, run_check=False, shape=divided.shape, stride=divided.stride()
    )
