"""What every Comm must do: one body a clause, run by each rank. Expected values are formulas in rank and size."""

from __future__ import annotations

from inspect import isfunction

import torch

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import allgather_json, broadcast_json, on_rank_0
from hvdtrain.errors import DataError

SUMMED = (torch.float32, torch.float64, torch.float16, torch.int32, torch.int64)
MOVED = (*SUMMED, torch.uint8, torch.bfloat16)


def allreduce_sums_in_place(comm: Comm) -> None:
    for dtype in SUMMED:
        mine = torch.arange(5, dtype=dtype) + comm.rank
        result = comm.allreduce(mine, name=f"sum/{dtype}").wait()
        expected = torch.arange(5, dtype=dtype) * comm.size + comm.size * (comm.size - 1) // 2
        assert torch.equal(result, expected.to(dtype))
        assert result.data_ptr() == mine.data_ptr()


def allreduce_takes_empty_and_scalar(comm: Comm) -> None:
    assert comm.allreduce(torch.tensor(2.0), name="scalar").wait().item() == 2.0 * comm.size
    assert comm.allreduce(torch.zeros(0), name="empty").wait().shape == (0,)


def collectives_match_by_name_in_any_order(comm: Comm) -> None:
    names = [f"order/{i}" for i in range(8)]
    if comm.rank % 2:
        names.reverse()
    handles = {name: comm.allreduce(torch.full((3,), float(name[-1])), name=name) for name in names}
    for name, handle in handles.items():
        assert handle.wait().tolist() == [float(name[-1]) * comm.size] * 3


def a_handle_is_done_at_last_and_waits_twice(comm: Comm) -> None:
    handle = comm.allreduce(torch.ones(2), name="twice")
    first = handle.wait()
    assert handle.done()
    assert handle.wait() is first


def what_is_in_flight_is_known_until_it_was_waited_for(comm: Comm) -> None:
    handle = comm.allgather(torch.ones(comm.rank), name="flight")
    assert "flight" in comm.in_flight or comm.size == 1
    handle.wait()
    comm.barrier()
    assert comm.in_flight == {}


def allgather_joins_unequal_parts(comm: Comm) -> None:
    for dtype in MOVED:
        mine = torch.full((comm.rank + 1, 2), comm.rank, dtype=dtype)
        result = comm.allgather(mine, name=f"gather/{dtype}").wait()
        expected = [[rank] * 2 for rank in range(comm.size) for _ in range(rank + 1)]
        assert result.dtype == dtype
        assert result.tolist() == expected


def alltoall_sends_rows(comm: Comm) -> None:
    even = torch.arange(2.0 * comm.size) + 100 * comm.rank
    result = comm.alltoall(even, name="even").wait()
    assert result.tolist() == [100.0 * r + 2 * comm.rank + i for r in range(comm.size) for i in range(2)]


def alltoall_sends_unequal_shares(comm: Comm) -> None:
    """Rank r sends r rows of 3 bytes to the rank after it, and nothing to the others."""
    rows = [comm.rank * (rank == (comm.rank + 1) % comm.size) for rank in range(comm.size)]
    mine = torch.full((comm.rank, 3), comm.rank, dtype=torch.uint8)
    result = comm.alltoall(mine, name="uneven", rows=rows).wait()
    before = (comm.rank - 1) % comm.size
    assert result.dtype == torch.uint8 and result.tolist() == [[before] * 3] * before


def reducescatter_shares_rows(comm: Comm) -> None:
    rows = 2 * comm.size + 1
    result = comm.reducescatter(torch.arange(float(rows)), name="scatter").wait()
    shares = torch.tensor_split(torch.arange(float(rows)) * comm.size, comm.size)
    assert torch.equal(result, shares[comm.rank])


def broadcast_overwrites(comm: Comm) -> None:
    root = comm.size - 1
    for dtype in MOVED:
        mine = torch.full((3,), comm.rank + 1, dtype=dtype)
        result = comm.broadcast(mine, name=f"broadcast/{dtype}", root=root).wait()
        assert result.dtype == dtype
        assert mine.tolist() == result.tolist() == [root + 1] * 3


def halves(size: int) -> list[list[int]]:
    """The ranks that `a_subset_has_ranks_of_its_own` asks for."""
    return [list(range(size // 2)), list(range(size // 2, size))]


def a_subset_has_ranks_of_its_own(comm: Comm) -> None:
    """The second half of the ranks is one; the ranks of both halves begin the same names at once."""
    ranks = next(half for half in halves(comm.size) if comm.rank in half)
    part = comm.subset(ranks, comm.rank - ranks[0], len(ranks))
    assert (part.rank, part.size) == (ranks.index(comm.rank), len(ranks))
    assert (part.local_rank, part.local_size) == (part.rank, part.size)
    for clause in CLAUSES:
        if clause is not a_subset_has_ranks_of_its_own:
            clause(part)
    assert comm.allreduce(torch.ones(1), name="all").wait().item() == comm.size


def objects_travel_as_json(comm: Comm) -> None:
    value = {"rank": comm.rank, "text": "ä" * 1000 * (comm.rank + 1), "none": None}
    assert broadcast_json(comm, value, name="json") == {"rank": 0, "text": "ä" * 1000, "none": None}
    assert [v["rank"] for v in allgather_json(comm, value, name="jsons")] == list(range(comm.size))


def an_error_of_rank_0_is_raised_everywhere(comm: Comm) -> None:
    def fail() -> None:
        raise DataError("no data", expected="some", found="none", next_step="bring some")

    try:
        on_rank_0(comm, fail, name="fail")
    except DataError as error:
        text = (error.what, error.expected, error.found, error.next_step)
        assert text == ("no data", "some", "none", "bring some") and error.everywhere
    else:
        raise AssertionError("no error")
    assert on_rank_0(comm, lambda: [comm.rank], name="works") == [0]


_OWN = [each for each in list(globals().values()) if isfunction(each) and each.__module__ == __name__]
CLAUSES = [each for each in _OWN if each.__code__.co_varnames[:1] == ("comm",)]
