"""Tensors that are divided among ranks: by torch, by rows or columns (DTensors), or whole on the ranks of stages."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, distributed, nn

from hvdtrain.state.pieces import Place, Whole

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class OnStages:
    """Where a parameter is in a pipeline: whole on the ranks of one stage, or of the first stage and the last one.

    On other ranks it has no elements: its length is 0. It is an attribute of a parameter, because tensors without
    memory have classes of their own; copies by `copy_of` have it, too, and others do not.
    """

    whole: tuple[int, ...]  # its shape on the ranks that hold it; one dimension or more
    stages: tuple[int, ...]  # those that hold it
    ranks: tuple[tuple[int, ...], ...]  # of each stage, which follow each other

    @property
    def holders(self) -> tuple[int, ...]:
        """The ranks that hold it."""
        return tuple(rank for stage in self.stages for rank in self.ranks[stage])

    def of(self, held: Tensor) -> nn.Parameter:
        """Return what this rank holds as a parameter, with the memory of `held`, or another tensor with its place."""
        found: Any = nn.Parameter(held.detach(), held.requires_grad)
        found.on_stages = self
        return found  # type: ignore[no-any-return]


def on_stages(tensor: object) -> OnStages | None:
    """Return where a parameter is in a pipeline; None if ranks do not divide it by stages."""
    return getattr(tensor, "on_stages", None)


def is_divided(tensor: object) -> bool:
    """Return whether a tensor is divided among ranks."""
    if on_stages(tensor) is not None:
        return True
    # Not imported: that takes most of a second, and where nobody has imported it, there are none.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def whole_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor, of all its parts together."""
    place = on_stages(tensor)
    return tuple(tensor.shape) if place is None else place.whole


class Cut(NamedTuple):
    """How ranks divide a dimension of a tensor: rank r has part ``r // stride % parts``."""

    dim: int
    stride: int
    parts: int

    def part_of(self, rank: int) -> int:
        """Return the number of a rank's part."""
        return rank // self.stride % self.parts


def name_of_parts(stages: int) -> str:
    """Return the name of the dimension of a mesh of ranks that divide something, in a pipeline of some stages.

    A tensor knows its mesh, and from this name, which ranks of the job have its stage.
    """
    return f"parts/{stages}"


def name_of_copies(stages: int) -> str:
    """Return the name of the dimension of ranks with copies of a part; see `name_of_parts`."""
    return f"copies/{stages}"


def share_count(shares: Sequence[Cut]) -> int:
    """Return how many ranks have all of a tensor together."""
    return math.prod(cut.parts for cut in shares)


def share_of(rank: int, shares: Sequence[Cut]) -> int:
    """Return which of the shares of a tensor a rank has, from 0."""
    found = 0
    for cut in shares:
        found = found * cut.parts + cut.part_of(rank)
    return found


def shares(tensor: Tensor) -> tuple[Cut, ...]:
    """Return how ranks share a tensor, as cuts of dimension 0: by stages of a pipeline, then by parts."""
    if (place := on_stages(tensor)) is not None:
        # The first stage and the last one have equal remainders by the number of stages less one.
        parts = len(place.ranks) - len(place.stages) + 1
        return (Cut(0, len(place.ranks[0]), parts),) if parts > 1 else ()
    names = cast("DTensor", tensor).device_mesh.mesh_dim_names or ()
    stages = next((int(name.partition("/")[2]) for name in names if "/" in name), 1)
    own = tuple(cut._replace(dim=0) for cut in cuts(tensor))
    return (Cut(0, distributed.get_world_size() // stages, stages), *own) if stages > 1 else own


def cuts(tensor: Tensor) -> tuple[Cut, ...]:
    """Return how the ranks of a stage divide a tensor; each cut divides a part of those before it.

    Empty: each rank has all of it.
    """
    divided = cast("DTensor", tensor)
    mesh, found = divided.device_mesh, []
    # FSDP is the first dimension of a mesh, and divides what the ranks of the second one hold.
    for index, placement in reversed([*enumerate(divided.placements)]):
        assert not placement.is_partial()
        if (dim := getattr(placement, "dim", None)) is not None:
            ranks = mesh.mesh.movedim(index, 0).reshape(mesh.size(index), -1)[:, 0].tolist()
            found.append(Cut(dim % tensor.dim(), ranks[1] - ranks[0] if ranks[1:] else 1, len(ranks)))
    return tuple(found)


def local(tensor: Tensor) -> Tensor:
    """Return the part that this rank holds, in the same memory; of other tensors, all."""
    if on_stages(tensor) is not None or not is_divided(tensor):
        return tensor.detach()
    with torch.no_grad():
        rows: Tensor = cast("DTensor", tensor).to_local()
        return rows.detach()


def place_of(tensor: Tensor) -> Place:
    """Return the place of this rank's part: torch gives each rank as many rows or columns, the last ones fewer."""
    if (place := on_stages(tensor)) is not None:
        if tensor.shape == place.whole:
            return Place(place.whole, (0,) * tensor.dim(), place.holders)
        others = [rank for stage, ranks in enumerate(place.ranks) if stage not in place.stages for rank in ranks]
        return Place(place.whole, (place.whole[0], *(0,) * (tensor.dim() - 1)), tuple(others))
    own, shared = distributed.get_rank(), shares(tensor)
    offset, _ = _box(tensor, cuts(tensor), own)
    ranks = [rank for rank in range(distributed.get_world_size()) if share_of(rank, shared) == share_of(own, shared)]
    return Place(tuple(tensor.shape), offset, tuple(ranks))


def ranks_with_rows(tensor: Tensor) -> tuple[int, ...]:
    """Return the ranks that hold a part."""
    if (place := on_stages(tensor)) is not None:
        return place.holders
    divided, shared = cuts(tensor), shares(tensor)
    of_stage = shared[: len(shared) - len(divided)]
    own, every = share_of(distributed.get_rank(), of_stage), range(distributed.get_world_size())
    ranks = (rank for rank in every if share_of(rank, of_stage) == own)
    return tuple(rank for rank in ranks if all(_box(tensor, divided, rank)[1]))


def _box(tensor: Tensor, divided: Sequence[Cut], rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offset and shape of the part of a rank; the offset of an empty part is at the end of the tensor."""
    offset, size = [0] * tensor.dim(), list(tensor.shape)
    for cut in divided:
        each = -(-size[cut.dim] // cut.parts)
        begin = min(cut.part_of(rank) * each, size[cut.dim])
        offset[cut.dim] += begin
        size[cut.dim] = min(each, size[cut.dim] - begin)
    ends = [begin if length else whole for begin, length, whole in zip(offset, size, tensor.shape, strict=True)]
    return tuple(ends), tuple(size)


def copy_of(parameter: nn.Parameter) -> Tensor:
    """Return a copy of the value, divided as the parameter is."""
    copied = parameter.detach().clone()
    return copied if (place := on_stages(parameter)) is None else place.of(copied)


def take_rows(tensor: Tensor | Whole, divided: Tensor | None, device: torch.device | None = None) -> Tensor:
    """Return a whole tensor, or this rank's rows of it as a DTensor if `divided` is one: a copy of them alone.

    A tensor that has the shape of this rank's rows already is these rows. `device`: of the rows (default: that of
    `divided`).
    """
    if divided is None or not is_divided(divided):
        return tensor if isinstance(tensor, Tensor) else tensor[...]
    own = local(divided)
    rows = tensor[...] if tuple(tensor.shape) == own.shape else place_of(divided).cut(tensor, own.shape).clone()
    placed = rows.to(device or own.device, own.dtype)
    if (place := on_stages(divided)) is not None:
        return place.of(placed)
    from torch.distributed.tensor import DTensor

    like = cast(DTensor, divided)
    return DTensor.from_local(
        placed, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
