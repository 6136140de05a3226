"""Gradients in buckets: sums, idle parameters and ranks, dtypes, layout; ranks are threads."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hvdtrain.compression.table import parse
from hvdtrain.engine.base import Engine
from hvdtrain.engine.in_all_copies import InAllCopies
from hvdtrain.engine.make import named_parameters as _held
from hvdtrain.errors import LaunchError, TaskError
from hvdtrain.exchange.agreement import check_same_names
from hvdtrain.exchange.reducer import BUCKET_BYTES, Reducer
from tests.support.thread_comm import ThreadComm, ThreadHandle, on_ranks, per_rank


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


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters())


def _step(reducer: Reducer, loss: Callable[[], Tensor]) -> list[Tensor]:
    reducer.begin()
    reducer.collect()
    loss().backward()
    return reducer.finish()


def _sums(size: int, passes: Callable[[int], int], **options: object) -> list[list[Tensor]]:
    """Gradients of each rank after two steps of an exchange; the second must not remember the first."""

    def body(comm: ThreadComm) -> list[Tensor]:
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = Engine(optimizer, InAllCopies(Reducer(lambda: named_parameters(model), comm, **options)))  # type: ignore[arg-type]
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
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("passes", [lambda rank: 1, lambda rank: 2, lambda rank: rank % 2], ids=["1", "2", "rank%2"])
def test_law_5_sums_equal_float64(size: int, passes: Callable[[int], int], bucket_bytes: int) -> None:
    """And all ranks hold equal bits."""
    expected = _reference(size, passes)
    every = _sums(size, passes, bucket_bytes=bucket_bytes)
    for found in every:
        for gradient, reference, other in zip(found, expected, every[0], strict=True):
            torch.testing.assert_close(gradient.double(), reference, rtol=1e-5, atol=1e-5)
            assert torch.equal(gradient, other)


@per_rank(2)
def test_gradients_are_views_of_what_finish_returns(comm: ThreadComm) -> None:
    model = _model()
    reducer = Reducer(lambda: named_parameters(model), comm, bucket_bytes=100)
    for flat in _step(reducer, lambda: model(_batch(comm.rank, 0)).sum()):
        flat.fill_(2.0)
    assert all(p.grad is not None and bool((p.grad == 2).all()) for p in model.parameters())


@pytest.mark.parametrize("compression", ["none", "fp16", "int8", "topk:0.2", "powersgd:2"])
@per_rank(2)
def test_complex_gradients_are_exchanged_as_pairs_of_real_ones(comm: ThreadComm, compression: str) -> None:
    """Also of a transposed parameter, and lazily conjugated ones; residuals are pairs, too."""
    zeros = torch.zeros(6, 4, dtype=torch.complex64)
    numbers = [nn.Parameter(zeros), nn.Parameter(zeros.clone().t())]
    pairs = [nn.Parameter(torch.view_as_real(p.detach()).clone()) for p in numbers]
    reducers = [
        Reducer(lambda o=own: [(str(n), p) for n, p in enumerate(o)], comm, parse(compression), name=name)  # type: ignore[misc]
        for name, own in (("complex", numbers), ("real", pairs))
    ]
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * comm.rank + step)
        given = [torch.randn(p.shape, dtype=p.dtype, generator=generator) for p in numbers]
        real = list(zip(pairs, map(torch.view_as_real, given), strict=True))
        _step(reducers[0], lambda g=given: (numbers[0].conj() * g[0] + (numbers[1] * g[1].conj()).t()).real.sum())
        _step(reducers[1], lambda g=real: sum((q * v).sum() for q, v in g))
        for p, q in zip(numbers, pairs, strict=True):
            assert p.grad is not None and q.grad is not None
            assert torch.equal(torch.view_as_real(p.grad.resolve_conj()), q.grad)
        for reducer in reducers:
            reducer.commit(applied=True)


@per_rank(1)
def test_a_second_gradient_in_one_pass_is_an_error(comm: ThreadComm) -> None:
    model = nn.Linear(2, 1)
    reducer = Reducer(lambda: named_parameters(model), comm)
    _step(reducer, lambda: model(torch.ones(1, 2)).sum())
    reducer.begin()
    reducer.collect()
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(TaskError, match=r"(weight|bias) got a second gradient"):
        model(torch.ones(1, 2)).sum().backward()


@per_rank(1)
def test_close_releases_the_parameters(comm: ThreadComm) -> None:
    model = nn.Linear(2, 1)
    reducer = Reducer(lambda: named_parameters(model), comm)
    reducer.collect()
    reducer.close()
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()


def test_the_exchange_follows_the_model_not_the_optimizers_groups() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD([{"params": parameters[::2]}, {"params": parameters[1::2]}], lr=0.1)
    assert [name for name, _ in _held(optimizer, model)] == ["0.weight", "0.bias", "1.weight", "1.bias"]


@per_rank(1)
def test_the_norm_is_that_of_the_parts(comm: ThreadComm) -> None:
    """Law 1 for clipping: one fp32 sum over a large buffer would be off by 2e-4."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(1000, 1000)) for _ in range(4)])
    reducer = Reducer(lambda: named_parameters(model), comm)
    values = [torch.randn(1000, 1000, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    found = _step(reducer, lambda: sum((p * v).sum() for p, v in zip(model, values, strict=True)))
    norm = nn.utils.get_total_norm(found)
    reference = sum(float((v.double() ** 2).sum()) for v in values) ** 0.5
    assert float(norm) == pytest.approx(reference, rel=2e-5)


class Unfinished(ThreadComm):
    """Collectives that end only when they are waited for; notes those that start."""

    def __init__(self, comm: ThreadComm) -> None:
        super().__init__(comm._hub, comm.rank)
        self.log: list[str] = []

    def allreduce(self, tensor: Tensor, *, name: str) -> ThreadHandle:
        self.log.append(name)
        handle = super().allreduce(tensor, name=name)
        handle.done = lambda: False  # type: ignore[method-assign]
        return handle


@per_rank(2)
def test_from_the_second_step_on_buckets_travel_while_backward_runs(comm: ThreadComm) -> None:
    recording = Unfinished(comm)
    model = _model()
    reducer = Reducer(lambda: named_parameters(model), recording, bucket_bytes=100)
    x = _batch(0, 0).abs()
    _step(reducer, lambda: model(x).sum())
    everything = sorted(recording.log)
    recording.log.clear()
    model.first.weight.register_hook(lambda g: recording.log.append("first.weight"))
    _step(reducer, lambda: model(x).sum())
    assert sorted(n for n in recording.log if n != "first.weight") == everything
    before = recording.log.index("first.weight")
    assert before >= 2, f"what backward finishes first was not sent before its end: {recording.log}"
    by_name = reducer.parameter_names()
    assert by_name[recording.log[0]][0].startswith("last."), "the layer that backward finishes first"
    assert [by_name[n] for n in recording.log[before + 1 :]][-1] == ["never.bias", "never.weight"], "idle ones last"


@per_rank(2)
def test_a_gradient_in_flight_is_not_in_p_grad(comm: ThreadComm) -> None:
    """Whoever clipped or scaled it now would not change what the optimizer follows."""
    model = _model()
    reducer = Reducer(lambda: named_parameters(model), comm)
    for step in range(2):
        reducer.begin()
        reducer.collect()
        model(_batch(comm.rank, step)).pow(2).sum().backward()
        there = [p.grad is not None for p in (model.first.weight, model.last.weight)]
        assert there == ([False, False] if step else [True, True])
        reducer.finish()


@per_rank(2)
def test_the_plan_is_rank_0s_and_lasts(comm: ThreadComm) -> None:
    """Rank 1 would have another order: its layers are used the other way round."""
    layers = [nn.Linear(2, 2, bias=False) for _ in range(3)]
    model = nn.ModuleList(layers)
    reducer = Reducer(lambda: named_parameters(model), comm, bucket_bytes=1)
    used = nn.Sequential(*(layers if comm.rank == 0 else reversed(layers)))
    for _ in range(2):
        _step(reducer, lambda: used(torch.ones(1, 2)).sum())
        assert reducer.state_dict()[1]["plan"]["buckets"] == (("2.weight",), ("1.weight",), ("0.weight",))


SAVED = [["0.weight", "1.bias"], ["0.bias", "1.weight"]]
TOGETHER = [[name for bucket in SAVED for name in bucket]]


@pytest.mark.parametrize(
    ("saved", "limit_bytes", "used"),
    [
        (SAVED, BUCKET_BYTES, SAVED),
        ([*SAVED, ["of another model"]], BUCKET_BYTES, TOGETHER),
        (SAVED, BUCKET_BYTES - 1, TOGETHER),
    ],
)
@per_rank(2)
def test_a_saved_plan_is_used_from_the_first_step_if_it_fits(
    comm: ThreadComm, saved: list[list[str]], limit_bytes: int, used: list[list[str]]
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    values = {"plan": {"buckets": saved, "sparse": [], "limit_bytes": limit_bytes}, "ranks": 2}
    reducer = Reducer(lambda: named_parameters(model), comm)
    reducer.load_state_dict({}, json.loads(json.dumps(values)))
    _step(reducer, lambda: model(torch.ones(1, 2)).sum())
    assert [*map(sorted, reducer.parameter_names().values())] == [*map(sorted, used)]


@per_rank(2)
def test_parameters_come_and_go_between_steps(comm: ThreadComm) -> None:
    model = _model()
    x = _batch(0, 0).abs()
    named = lambda: [(n, p) for n, p in named_parameters(model) if p.requires_grad]  # noqa: E731
    reducer = Reducer(named, comm, bucket_bytes=100)
    for frozen in ([], ["first.weight", "scale"], ["never.bias"], []):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen)
        for _ in range(2):
            model.zero_grad()
            _step(reducer, lambda: model(x).sum())
            alone = copy.deepcopy(model)
            alone.zero_grad()
            alone(x).sum().backward()
            for (name, found), expected in zip(model.named_parameters(), alone.parameters(), strict=True):
                if name in frozen:
                    assert found.grad is None, f"{name} is frozen: the optimizer must not see it"
                else:
                    assert found.grad is not None
                    single = expected.grad if expected.grad is not None else torch.zeros_like(found)
                    torch.testing.assert_close(found.grad, 2 * single)


@per_rank(2)
def test_unlike_parameters_are_named_on_every_rank(comm: ThreadComm) -> None:
    model = nn.Linear(2, 2 + comm.rank)
    reducer = Reducer(lambda: named_parameters(model), comm)
    with pytest.raises(LaunchError, match=r"rank 1 .* parameter 0") as caught:
        _step(reducer, lambda: model(torch.ones(1, 2)).sum())
    assert caught.value.everywhere
    assert "[2, 2]" in str(caught.value.expected) and "[3, 2]" in str(caught.value.found)


@pytest.mark.parametrize("other", [["a"], ["b", "a"], ["a", "c"], []])
@per_rank(2)
def test_ranks_that_train_different_parameters_all_raise(comm: ThreadComm, other: list[str]) -> None:
    check_same_names(comm, ["a", "b"], name="same")
    with pytest.raises(LaunchError, match="different parameters") as caught:
        check_same_names(comm, other if comm.rank == 1 else ["a", "b"], name="other")
    assert caught.value.found == f"2 on rank 0, {len(other)} on rank 1"


@per_rank(2)
def test_passes_are_counted_where_nobody_announces_them(comm: ThreadComm) -> None:
    model, reference = _model(), _reference(2, lambda rank: 3)
    reducer = Reducer(lambda: named_parameters(model), comm, passes=3)
    for _ in range(2):
        model.zero_grad()
        reducer.begin()
        for index in range(3):
            model(_batch(comm.rank, index)).pow(2).sum().backward()
            assert reducer.begun == (index == 2), "gradients travel during the last one"
        reducer.finish()
    for parameter, expected in zip(model.parameters(), reference, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("compression", "state", "expected"),
    [
        ("fp16", {"p/fp16_scale": torch.tensor([4, 0])}, 1.0),  # rank 0 has seen an overflow
        ("int8", {"p/residual": torch.full((4, 4), 3.0)}, 4.0),
    ],
)
@per_rank(2)
def test_a_rank_that_joins_agrees_with_the_others_and_owes_nothing(
    comm: ThreadComm, compression: str, state: dict[str, Tensor], expected: float
) -> None:
    parameter = nn.Parameter(torch.zeros(4, 4))
    reducer = Reducer(lambda: [("p", parameter)], comm, parse(compression), weight=0.5, passes=1)
    plan = {"buckets": [["p"]], "sparse": [], "limit_bytes": BUCKET_BYTES}
    reducer.load_state_dict({} if comm.rank else state, {"plan": None if comm.rank else plan, "ranks": 2})
    reducer.restart(comm, 0.5, 1.0)
    parameter.sum().backward()
    reducer.finish()
    torch.testing.assert_close(parameter.grad, torch.full((4, 4), expected))
