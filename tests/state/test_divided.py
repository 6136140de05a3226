"""Where parts of tensors are: rows, columns, and rows of parts, with fewer rows than ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from hvdtrain.comm.solo import imagined_ranks
from hvdtrain.state.divided import Cut, OnStages, cuts, name_of_parts, place_of, ranks_with_rows, share_of, shares

RANKS = 8


@pytest.fixture(autouse=True)
def eight_ranks() -> Iterator[None]:
    with imagined_ranks(RANKS):
        yield


def _divided(shape: tuple[int, ...], width: int, *placements: Placement, stages: int = 1) -> DTensor:
    """Return rank 0's part of a tensor: of FSDP and of parts with two placements, of parts with one."""
    ranks = torch.arange(RANKS // stages).view(-1, width)
    names = ("copies", name_of_parts(stages))
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names)
    own: Tensor = torch.zeros(shape)
    for placement, index in zip(reversed(placements), (1, 0), strict=False):
        if (dim := getattr(placement, "dim", None)) is not None:
            own = own.chunk(mesh.size(index), dim)[0]
    of = mesh if len(placements) == 2 else mesh[names[1]]
    return DTensor.from_local(own, of, placements, run_check=False, shape=torch.Size(shape), stride=(shape[1], 1))


STRIDED = _StridedShard(0, split_factor=2)
ROWS_OF = {
    "rows": ((7, 3), 2, (Shard(0),), (Cut(0, 1, 2),)),
    "columns": ((2, 7), 4, (Shard(-1),), (Cut(1, 1, 4),)),
    "rows of rows": ((7, 3), 2, (STRIDED, Shard(0)), (Cut(0, 1, 2), Cut(0, 2, 4))),
    "rows of columns": ((6, 5), 2, (Shard(0), Shard(1)), (Cut(1, 1, 2), Cut(0, 2, 4))),
    "rows of whole ones": ((5, 2), 2, (Shard(0), Replicate()), (Cut(0, 2, 4),)),
    "few rows": ((3, 2), 2, (STRIDED, Shard(0)), (Cut(0, 1, 2), Cut(0, 2, 4))),
}


@pytest.mark.parametrize("name", ROWS_OF)
def test_the_parts_of_all_ranks_are_the_tensor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, width, placements, expected = ROWS_OF[name]
    tensor = _divided(shape, width, *placements)
    assert cuts(tensor) == expected
    copies = RANKS // len({share_of(rank, expected) for rank in range(RANKS)})
    seen: Counter[tuple[int, ...]] = Counter()
    with_rows = []
    for rank in range(RANKS):
        monkeypatch.setattr("torch.distributed.get_rank", lambda rank=rank: rank)
        place = place_of(tensor)
        assert rank in place.ranks and len(place.ranks) == copies
        sizes = list(shape)
        for cut in expected:
            parts = torch.arange(sizes[cut.dim]).chunk(cut.parts)
            sizes[cut.dim] = len(parts[cut.part_of(rank)]) if cut.part_of(rank) < len(parts) else 0
        inside = [range(begin, begin + size) for begin, size in zip(place.offset, sizes, strict=True)]
        seen.update(product(*inside))
        if all(sizes):
            with_rows.append(rank)
        else:
            assert place.offset[sizes.index(0)] == shape[sizes.index(0)], "at the end, where no other part begins"
    assert seen == Counter(dict.fromkeys(product(*map(range, shape)), copies))
    assert ranks_with_rows(tensor) == tuple(with_rows)
    if name == "few rows":
        assert len(with_rows) < RANKS


def test_each_stage_of_a_pipeline_has_parts_of_its_own() -> None:
    tensor = _divided((4, 2), 2, Shard(0), stages=2)
    assert shares(tensor) == (Cut(0, 4, 2), Cut(0, 1, 2))
    assert place_of(tensor).ranks == (0, 2) and ranks_with_rows(tensor) == (0, 1, 2, 3)
    whole = OnStages((2, 2), (0,), ((0, 1, 2, 3), (4, 5, 6, 7))).of(torch.zeros(2, 2))
    assert shares(whole) == (Cut(0, 4, 2),) and place_of(whole).ranks == (0, 1, 2, 3)
    assert [share_of(rank, shares(tensor)) for rank in range(RANKS)] == [0, 1, 0, 1, 2, 3, 2, 3]
