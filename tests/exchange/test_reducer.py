"""Gradients in buckets: sums, idle parameters and ranks, dtypes, layout; ranks are threads."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hvdtrain.engine import ExchangeEngine
from hvdtrain.engine import _named as _held
from hvdtrain.errors import TaskError
from hvdtrain.exchange.buckets import lay_out
from hvdtrain.exchange.reducer import Reducer
from tests.support.thread_comm import ThreadComm, on_ranks


class Mixed(nn.Module):
    """Odd shapes, a scalar, a tied weight, a layer that only some inputs use, one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 7)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.sometimes = nn.Linear(7, 7, bias=False)
        self.never = nn.Linear(1, 5)
        self.last = nn.Linear(7, 3)
        self.tied = self.last.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)) * self.scale
        if x.sum() > 0:
            hidden = self.sometimes(hidden)
        return self.last(hidden) @ self.tied


def _model(dtype: torch.dtype = torch.float32) -> Mixed:
    torch.manual_seed(1)
    return Mixed().to(dtype)


def _batch(rank: int, index: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * rank + index)).to(dtype)


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters())


def _sums(size: int, passes: Callable[[int], int], **options: object) -> list[list[Tensor]]:
    """Gradients of each rank after two steps of an exchange; the second must not remember the first."""
    models = [_model() for _ in range(size)]  # not by the ranks: torch's random state is one for all threads

    def body(comm: ThreadComm) -> list[Tensor]:
        model = models[comm.rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = ExchangeEngine(optimizer, Reducer(_named(model), comm, **options))  # type: ignore[arg-type]
        for _ in range(2):
            engine.begin(passes(comm.rank))
            for index in range(passes(comm.rank)):
                engine.backward(model(_batch(comm.rank, index)).pow(2).sum())
            engine.finish()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    # Autograd's hooks run in the thread that calls backward, so that threads do as ranks.
    return on_ranks(size, body)


def _reference(size: int, passes: Callable[[int], int]) -> list[Tensor]:
    model = _model().double()
    for rank in range(size):
        for index in range(passes(rank)):
            model(_batch(rank, index).double()).pow(2).sum().backward()
    return [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]


@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("passes", [lambda rank: 1, lambda rank: 2, lambda rank: rank % 2], ids=["1", "2", "rank%2"])
def test_law_5_sums_equal_float64(size: int, passes: Callable[[int], int], bucket_bytes: int) -> None:
    expected = _reference(size, passes)
    for found in _sums(size, passes, bucket_bytes=bucket_bytes):
        assert len(found) == len(expected)
        for gradient, reference in zip(found, expected, strict=True):
            torch.testing.assert_close(gradient.double(), reference, rtol=1e-5, atol=1e-5)


def test_ranks_hold_equal_bits() -> None:
    first, *others = _sums(4, lambda rank: 1)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_fp16_travels_as_fp16() -> None:
    expected = _reference(2, lambda rank: 1)
    for gradient, reference in zip(_sums(2, lambda rank: 1, compression="fp16")[0], expected, strict=True):
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, gradient.half().float())
        torch.testing.assert_close(gradient.double(), reference, rtol=1e-2, atol=1e-2)


def test_gradients_are_views_of_what_finish_returns() -> None:
    models = [_model(), _model()]

    def body(comm: ThreadComm) -> None:
        model = models[comm.rank]
        reducer = Reducer(_named(model), comm, bucket_bytes=100)
        reducer.begin()
        reducer.collect()
        model(_batch(comm.rank, 0)).sum().backward()
        for flat in reducer.finish():
            flat.fill_(2.0)
        assert all(p.grad is not None and bool((p.grad == 2).all()) for p in model.parameters())

    on_ranks(2, body)


def test_a_second_gradient_in_one_pass_is_an_error() -> None:
    def body(comm: ThreadComm) -> None:
        model = nn.Linear(2, 1)
        reducer = Reducer(_named(model), comm)
        reducer.begin()
        reducer.collect()
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(TaskError, match=r"weight got its gradient a second time|bias got its gradient"):
            model(torch.ones(1, 2)).sum().backward()

    on_ranks(1, body)


def test_close_lets_go_of_the_parameters() -> None:
    def body(comm: ThreadComm) -> None:
        model = nn.Linear(2, 1)
        reducer = Reducer(_named(model), comm)
        reducer.collect()
        reducer.close()
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()

    on_ranks(1, body)


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=3), st.sampled_from(["float32", "float64", "bfloat16"]))),
    st.integers(1, 4000),
)
def test_a_layout_holds_each_parameter_once_without_overlap(
    shapes: list[tuple[list[int], str]], limit_bytes: int
) -> None:
    named = [
        (f"p{i}", nn.Parameter(torch.zeros(shape, dtype=getattr(torch, dtype))))
        for i, (shape, dtype) in enumerate(shapes)
    ]
    layouts = lay_out(named, limit_bytes)
    seen = [slot.name for layout in layouts for slot in layout.slots]
    assert sorted(seen) == sorted(name for name, _ in named)
    for layout in layouts:
        flat = torch.zeros(layout.length, dtype=layout.dtype)
        for slot in layout.slots:
            assert slot.parameter.dtype == layout.dtype
            view = slot.view(flat)
            assert view.shape == slot.parameter.shape
            assert view.numel() == 0 or (view.data_ptr() - flat.data_ptr()) % 64 == 0
            view += 1
        assert flat.max() <= 1 if flat.numel() else True
        last = layout.slots[-1]
        if len(layout.slots) > 1:
            assert (last.start + last.parameter.numel()) * layout.dtype.itemsize <= limit_bytes


def test_a_layout_follows_backward() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    (layout,) = lay_out(_named(model), 1 << 20)
    assert [slot.name for slot in layout.slots] == ["1.bias", "1.weight", "0.bias", "0.weight"]
    assert lay_out(_named(copy.deepcopy(model)), 1 << 20)[0].length == layout.length


def test_the_exchange_follows_the_model_not_the_optimizers_groups() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD([{"params": parameters[::2]}, {"params": parameters[1::2]}], lr=0.1)
    assert [name for name, _ in _held(optimizer, model)] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_the_norm_is_that_of_the_parts() -> None:
    """Law 1 for clipping: one fp32 sum over a large buffer would be off by 2e-4."""

    def body(comm: ThreadComm) -> None:
        model = nn.ParameterList([nn.Parameter(torch.zeros(1000, 1000)) for _ in range(4)])
        reducer = Reducer(_named(model), comm)
        reducer.begin()
        reducer.collect()
        values = [torch.randn(1000, 1000, generator=torch.Generator().manual_seed(i)) for i in range(4)]
        sum((p * v).sum() for p, v in zip(model, values, strict=True)).backward()  # type: ignore[union-attr]
        norm = nn.utils.get_total_norm(reducer.finish())
        reference = sum(float((v.double() ** 2).sum()) for v in values) ** 0.5
        assert float(norm) == pytest.approx(reference, rel=2e-5)

    on_ranks(1, body)
