"""What compression owes is not lost where parameters are frozen, ranks become others, or the loss scale changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hvdtrain.comm.solo import SoloComm
from hvdtrain.compression.table import parse
from hvdtrain.engine.base import Engine
from hvdtrain.engine.make import make_engine
from hvdtrain.engine.one_rank import OneRank
from hvdtrain.exchange.active_buckets import BetweenCopies, DetachedState
from hvdtrain.exchange.optimizer import exchanging
from hvdtrain.exchange.own_loop import Exchange
from hvdtrain.exchange.reducer import Reducer
from hvdtrain.plan.plan import Plan
from hvdtrain.spans import Spans
from tests.support.thread_comm import ThreadComm, on_ranks, per_rank

TENSORS = {"a/residual": torch.ones(2), "a/powersgd_q": torch.ones(3), "b.c/residual": torch.full((2,), 2.0)}


def test_residuals_are_told_from_what_was_learned() -> None:
    """They alone follow the loss scale, and keep their sum over another number of ranks."""
    state = DetachedState({key: tensor.clone() for key, tensor in TENSORS.items()}, 4)
    reducer = Reducer(list, SoloComm())
    reducer.detached = state
    reducer.drop_all_but_residuals(3)
    residuals = reducer.detached
    assert (sorted(residuals.tensors), residuals.ranks) == (["a/residual", "b.c/residual"], 3)
    rest = state.without_parameters({"a"}, 2)
    assert (list(rest.tensors), rest.ranks) == (["b.c/residual"], 2)
    assert 2 * rest.tensors["b.c/residual"].sum() == 4 * TENSORS["b.c/residual"].sum()
    state.rescale(0.5)
    assert state.tensors["b.c/residual"].tolist() == [1.0, 1.0]
    assert torch.equal(state.tensors["a/powersgd_q"], TENSORS["a/powersgd_q"])


@per_rank(2)
def test_a_parameter_that_was_frozen_for_a_while_gets_what_it_is_owed(comm: ThreadComm) -> None:
    """Top-k of one element a step: most of the gradient is owed when the layer freezes."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))])
    reducer = Reducer(
        lambda: [(n, p) for n, p in model.named_parameters() if p.requires_grad], comm, parse("topk:0.01")
    )
    total = torch.zeros(8)
    for step in range(60):
        model[1].requires_grad_(not 10 <= step < 20)
        model.zero_grad()
        reducer.begin()
        reducer.collect()
        scale = 1.0 if step < 10 else 0.0
        sum((p * scale).sum() for p in model if p.requires_grad).backward()  # type: ignore[union-attr]
        reducer.finish()
        if model[1].grad is not None:
            total += model[1].grad
        reducer.commit(applied=True)
    assert float(total.sum()) == 2 * 8 * 10.0


def _owing(comm: ThreadComm, weight: float) -> tuple[dict[str, Tensor], dict[str, object], Tensor]:
    """The settled state of top-k after three steps, and the sum of what it has delivered."""
    parameter = nn.Parameter(torch.zeros(8))
    reducer = Reducer(lambda: [("p", parameter)], comm, parse("topk:0.01"), weight=weight)
    total = torch.zeros(8)
    for _ in range(3):
        total += _step(reducer, parameter, torch.arange(8.0) + comm.rank)
    reducer.synchronize_state()
    tensors, values = reducer.state_dict()
    return {key: tensor.clone() for key, tensor in tensors.items()}, values, total


def _step(reducer: Reducer, parameter: nn.Parameter, gradient: Tensor, *, applied: bool = True) -> Tensor:
    parameter.grad = None
    reducer.begin()
    reducer.collect()
    if gradient.count_nonzero():
        (parameter * gradient).sum().backward()
    reducer.finish()
    reducer.commit(applied=applied)
    assert parameter.grad is not None
    return parameter.grad.clone()


@pytest.mark.parametrize("compression", ["none", "fp16", "int8"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_is_owed_is_delivered_by_whatever_compression_comes_next(compression: str, size: int) -> None:
    """Once: a step that is not applied delivers nothing; saved meanwhile, it is still owed."""
    saved = on_ranks(2, lambda comm: _owing(comm, 0.5))
    tensors, values, delivered = saved[0]
    owed = 0.5 * 3 * (2 * torch.arange(8.0) + 1) - delivered
    assert owed.count_nonzero()

    def body(comm: ThreadComm) -> list[Tensor]:
        parameter = nn.Parameter(torch.zeros(8))
        reducer = Reducer(lambda: [("p", parameter)], comm, parse(compression), weight=0.5)
        reducer.load_state_dict(tensors, values)
        found = [_step(reducer, parameter, torch.zeros(8), applied=False)]
        assert "p/residual" in reducer.state_dict()[0]
        found += [_step(reducer, parameter, torch.ones(8) * comm.rank) for _ in range(2)]
        assert compression == "int8" or "p/residual" not in reducer.state_dict()[0]
        return found

    ranks = 0.5 * torch.ones(8) * sum(range(size))
    for skipped, first, second in on_ranks(size, body):
        torch.testing.assert_close(skipped, owed, rtol=2e-2, atol=0.2)
        torch.testing.assert_close(first + second, owed + 2 * ranks, rtol=2e-2, atol=0.2)
        torch.testing.assert_close(second, ranks, rtol=2e-2, atol=0.2)


@per_rank(2)
def test_copies_of_a_part_deliver_what_another_number_of_them_owes(comm: ThreadComm) -> None:
    parameter = nn.Parameter(torch.zeros(8))
    copies = BetweenCopies([("p", parameter)], comm, parse("int8"), 1 << 20, Spans(), "part")
    copies.load_state_dict({"p/residual": torch.ones(8)}, {"ranks": 4})
    copies.begin()
    parameter.grad = torch.full((8,), 3.0)
    copies.add_gradient("p")
    copies.finish()
    torch.testing.assert_close(parameter.grad, torch.full((8,), 2 * 3.0 + 4 * 1.0))


def test_one_rank_alone_delivers_what_several_owe() -> None:
    tensors, values, delivered = on_ranks(2, lambda comm: _owing(comm, 1.0))[0]
    parameter = nn.Parameter(torch.zeros(8))
    engine = Engine(torch.optim.SGD([parameter], lr=1.0), OneRank(lambda: [("p", parameter)]))
    engine.load_state_dict(tensors, values)
    owed = 3 * (2 * torch.arange(8.0) + 1) - delivered
    for applied, scale in ((False, 1.0), (True, 0.5)):
        engine.begin(1)
        engine.backward((parameter * 2).sum())
        engine.residuals.rescale(scale)
        (gradient,) = engine.finish()
        torch.testing.assert_close(gradient, scale * owed + 2)
        assert "p/residual" in engine.state_dict()[0]
        engine.commit(applied=applied)
    assert not engine.state_dict()[0]
    engine.begin(1)
    engine.backward((parameter * 2).sum())
    assert torch.equal(engine.finish()[0], torch.full((8,), 2.0))


@per_rank(2)
def test_a_switch_of_compression_shares_what_is_owed_so_that_it_can_be_saved(comm: ThreadComm) -> None:
    parameter = nn.Parameter(torch.zeros(8))
    reducer = Reducer(lambda: [("p", parameter)], comm, parse("topk:0.01"))
    _step(reducer, parameter, torch.arange(8.0) * comm.rank)
    reducer.switch(parse("none"))
    owed = reducer.state_dict()[0]["p/residual"]
    assert owed.count_nonzero() and torch.equal(comm.allreduce(owed.clone(), name="test").wait(), 2 * owed)


def _trained(comm: ThreadComm, scales: list[float], compression: str) -> Tensor:
    """A parameter after steps of SGD under these loss scales, with the same gradients."""
    parameter = nn.Parameter(torch.zeros(8))
    reducer = Reducer(lambda: [("p", parameter)], comm, parse(compression), weight=1 / comm.size, passes=1)
    terms = (comm, 1 / comm.size, 1.0)
    optimizer = exchanging(torch.optim.SGD([parameter], lr=1.0), Exchange(reducer, lambda: terms, lambda: 0))
    scaler = torch.amp.GradScaler("cpu", init_scale=scales[0], growth_interval=1000)
    for scale in [*scales[1:], scales[-1]]:
        optimizer.zero_grad()
        scaler.scale((parameter * (torch.arange(8.0) + comm.rank)).sum()).backward()
        scaler.step(optimizer)
        scaler.update(scale)
    return parameter.detach()


@pytest.mark.parametrize("compression", ["topk:0.2", "int8"])
def test_a_loss_scale_that_changes_changes_no_step(compression: str) -> None:
    """By powers of two, so that nothing is rounded."""
    plain = on_ranks(2, lambda comm: _trained(comm, [64.0] * 6, compression))
    found = on_ranks(2, lambda comm: _trained(comm, [64.0, 64.0, 8.0, 8.0, 256.0, 16.0], compression))
    assert plain[0].count_nonzero() and all(torch.equal(plain[0], one) for one in [*plain, *found])


def test_the_exchange_restarts_once_when_the_ranks_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each further restart would drop what compression has learned."""
    parameter, session, restarts = nn.Parameter(torch.zeros(8)), [0], list[int]()
    reducer = Reducer(lambda: [("p", parameter)], SoloComm(), parse("int8"), weight=1.0, passes=1)
    monkeypatch.setattr(reducer, "restart", lambda *_: restarts.append(session[0]))
    terms = (SoloComm(), 1.0, 1.0)
    optimizer = exchanging(torch.optim.SGD([parameter], lr=1.0), Exchange(reducer, lambda: terms, lambda: session[0]))
    for session[0] in (1, 1, 2, 2, 2):
        parameter.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert restarts == [1, 2]


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_a_divided_optimizer_delivers_once_what_several_owe(shard: str) -> None:
    """With several passes, in one of them."""

    def body(comm: ThreadComm) -> Tensor:
        model = nn.Linear(512, 512, bias=False)  # rows for each rank
        engine = make_engine(torch.optim.SGD(model.parameters(), lr=1.0), model, comm, Plan(shard=shard))
        engine.load_state_dict({"weight/residual": torch.full((512, 512), 3.0)}, {"ranks": 4, "plan": None})
        engine.begin(2)
        for _ in range(2):
            engine.backward(model.weight.sum())
        (gradient,) = engine.finish()
        return gradient

    for gradient in on_ranks(2, body):
        assert gradient.unique().tolist() == [2 * 2 * 1.0 + 4 * 3.0]
