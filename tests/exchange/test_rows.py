"""Gradients with few non-zero rows, dense and sparse: exchanging these rows gives the whole sum."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hvdtrain.comm.base import Handle
from hvdtrain.compression.table import parse
from hvdtrain.exchange.reducer import BUCKET_BYTES, Reducer
from tests.support.thread_comm import ThreadComm, on_ranks, per_rank

ROWS, COLUMNS = 4096, 130
NAMES = ["none", "fp16", "bf16", "int8", "topk:0.01", "powersgd:2"]
Fill = Callable[[int, int], Tensor | None]


class Counting(ThreadComm):
    def _counted(self, tensor: Tensor, name: str) -> None:
        self.bytes = {**getattr(self, "bytes", {}), name: tensor.numel() * tensor.element_size()}

    def allreduce(self, tensor: Tensor, *, name: str) -> Handle:
        self._counted(tensor, name)
        return super().allreduce(tensor, name=name)


def _some(rank: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of which ranks have some in common; one is nowhere above zero, and zero in places."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    gradient = torch.zeros(ROWS, COLUMNS, dtype=dtype)
    rows = [*torch.randperm(ROWS, generator=generator)[:20].tolist(), 7, 4000 + step]
    gradient[rows] = torch.randn(len(rows), COLUMNS, generator=generator).to(dtype) * 1e-3
    gradient[rows[0]] = -gradient[rows[0]].relu()
    return gradient


def _exchanged(
    size: int, fill: Fill, compression: str, steps: int = 3, dtype: torch.dtype = torch.float32
) -> list[tuple[list[Tensor], Counting]]:
    def body(comm: ThreadComm) -> tuple[list[Tensor], Counting]:
        counting = Counting(comm._hub, comm.rank)
        parameter = nn.Parameter(torch.zeros(ROWS, COLUMNS, dtype=dtype))
        reducer = Reducer(lambda: [("rows", parameter)], counting, parse(compression), weight=0.5, factor=3.0)
        sums = []
        for step in range(steps):
            parameter.grad = None
            reducer.begin()
            reducer.collect()
            if (gradient := fill(comm.rank, step)) is not None:
                (parameter * gradient).sum().backward()
            returned = reducer.finish()
            assert parameter.grad is not None
            assert any(t.data_ptr() == parameter.grad.data_ptr() for t in returned), "clipping reaches it"
            reducer.commit(applied=True)
            sums.append(parameter.grad.clone())
        return sums, counting

    return on_ranks(size, body)


@pytest.mark.parametrize(
    ("size", "dtype"), [(2, torch.float32), (2, torch.float64), (2, torch.bfloat16), (3, torch.float32)], ids=str
)
@pytest.mark.parametrize("compression", NAMES)
def test_sums_are_those_of_whole_gradients(compression: str, size: int, dtype: torch.dtype) -> None:
    found = _exchanged(size, lambda rank, step: _some(rank, step, dtype), compression, dtype=dtype)
    for step in range(1, 3):
        expected = 1.5 * sum(_some(rank, step, dtype).double() for rank in range(size))
        got = found[0][0][step]
        tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-6 if compression == "none" else 1e-3
        assert (got - expected).abs().max() < tolerance * expected.abs().max()
        assert all(torch.equal(got, sums[step]) for sums, _ in found), "equal bits"


@pytest.mark.parametrize("compression", ["none", "fp16", "powersgd:2"])
def test_only_rows_that_some_rank_has_touched_are_sent(compression: str) -> None:
    for _, comm in _exchanged(2, _some, compression):
        touched = sum(_some(rank, 2) for rank in range(2)).any(1).sum()
        assert comm.bytes["gradients/0/values"] == touched * COLUMNS * (4 if compression == "none" else 2)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-9, 1.0, 1e9, 1e30])
def test_halves_keep_their_precision_whatever_the_size_of_gradients(magnitude: float) -> None:
    found = _exchanged(3, lambda rank, step: _some(rank, step) * magnitude, "fp16")
    expected = 1.5 * magnitude * sum(_some(rank, 2).double() for rank in range(3))
    largest = expected.abs().max()
    assert (found[0][0][2] - expected).abs().max() < 1e-3 * largest


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_what_is_not_finite_on_one_rank_is_so_on_all_and_in_that_step_alone(compression: str, bad: float) -> None:
    def fill(rank: int, step: int) -> Tensor:
        gradient = _some(rank, step)
        if (rank, step) == (1, 1):
            gradient[100, 3] = bad
        return gradient

    for sums, _ in _exchanged(2, fill, compression):
        assert [bool(torch.isfinite(s).all()) for s in sums] == [True, False, True]


@pytest.mark.parametrize("idle", [{0}, {1}, {0, 1}], ids=str)
def test_ranks_without_a_gradient_take_part(idle: set[int]) -> None:
    def fill(rank: int, step: int) -> Tensor | None:
        return None if step and rank in idle else _some(rank, step)

    for sums, _ in _exchanged(2, fill, "none"):
        rest: list[Tensor] = [_some(rank, 2) for rank in range(2) if rank not in idle]
        torch.testing.assert_close(sums[2], 1.5 * sum(rest, torch.zeros(ROWS, COLUMNS)))


def test_many_rows_after_all_go_back_to_a_bucket() -> None:
    def fill(rank: int, step: int) -> Tensor:
        return torch.full((ROWS, COLUMNS), 1.0 + rank) if step == 1 else _some(rank, step)

    for sums, comm in _exchanged(2, fill, "none"):
        torch.testing.assert_close(sums[1], torch.full((ROWS, COLUMNS), 4.5))
        assert comm.bytes["gradients/0"] == ROWS * COLUMNS * 4, "the step after it sends all"


def test_a_gradient_of_zeros_says_nothing_of_its_rows() -> None:
    for _, comm in _exchanged(2, lambda rank, step: torch.zeros(ROWS, COLUMNS), "none"):
        assert list(comm.bytes)[-1] == "gradients/0"


@pytest.mark.parametrize(("owed", "planned", "rows"), [(False, True, True), (True, True, False), (True, False, False)])
@per_rank(2)
def test_a_saved_plan_has_its_rows_unless_others_are_owed(
    comm: ThreadComm, owed: bool, planned: bool, rows: bool
) -> None:
    counting = Counting(comm._hub, comm.rank)
    parameter = nn.Parameter(torch.zeros(ROWS, COLUMNS))
    reducer = Reducer(lambda: [("rows", parameter)], counting, parse("int8"), weight=0.5)
    plan = {"buckets": [["rows"]], "sparse": [], "rows": {"rows": 30}, "limit_bytes": BUCKET_BYTES}
    state = {"rows/residual": torch.ones(ROWS, COLUMNS)} if owed else {}
    reducer.load_state_dict(state, {"plan": plan if planned else None, "ranks": 2})
    reducer.begin()
    reducer.collect()
    (parameter * _some(comm.rank, 0)).sum().backward()
    reducer.finish()
    assert ("gradients/0/values" in getattr(counting, "bytes", {})) == rows
    assert not owed or parameter.grad.mean().item() == pytest.approx(2.0, rel=1e-2)


# Gradients that torch makes sparse.


def _model(sparse: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(10, 3, sparse=sparse), nn.Linear(3, 2))


def _indices(rank: int, step: int) -> Tensor:
    return torch.tensor([rank, step, 3, 3])


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("idle", [False, True], ids=["all", "rank 0 idles"])
@per_rank()
def test_sparse_sums_equal_dense_ones(comm: ThreadComm, size: int, idle: bool) -> None:
    both = []
    for kind in (True, False):
        model = _model(kind)
        reducer = Reducer(lambda m=model: list(m.named_parameters()), comm, weight=0.5, factor=3.0, name=str(kind))  # type: ignore[misc]
        for step in range(3):
            model.zero_grad()
            reducer.begin()
            reducer.collect()
            if not (idle and comm.rank == 0 and size > 1):
                model(_indices(comm.rank, step)).pow(2).sum().backward()
            returned = reducer.finish()
        both.append(model)
        if kind:
            embedding = model[0].weight.grad
            assert embedding is not None and embedding.is_sparse
            assert any(t.data_ptr() == embedding._values().data_ptr() for t in returned), "clipping reaches it"
            assert len(embedding._values()) < 10, "only rows that were used"
    for ours, dense in zip(both[0].parameters(), both[1].parameters(), strict=True):
        assert ours.grad is not None and dense.grad is not None
        torch.testing.assert_close(ours.grad.to_dense(), dense.grad)
