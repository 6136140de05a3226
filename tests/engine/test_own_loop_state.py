"""The state of a divided optimizer in a user's loop: gathered, loaded, and that of its compression."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvdtrain.errors import LaunchError
from tests.support.own_loops import OPTIMIZERS, Model, distribute, loss_of, make, train
from tests.support.thread_comm import ThreadComm, on_ranks, per_rank


def test_a_state_fits_any_division() -> None:
    """Whole, then divided by two, three and two ranks, as without interruption; momentum of each parameter counts."""
    sizes = (1, 2, 3, 2)
    states: list[Any] = [None, None]
    losses: list[float] = []

    def body(comm: ThreadComm, shard: str, first: int, count: int) -> Any:
        model, optimizer = make(comm, shard)
        if states[0] is not None:
            model.load_state_dict(states[0])
            optimizer.load_state_dict(states[1])
            for parameter, slots in optimizer.state.items():
                assert all(v.stride() == parameter.stride() for v in slots.values() if v.shape == parameter.shape)
        found = []
        for step in range(first, first + count):
            optimizer.zero_grad()
            loss = loss_of(model, 0, step)  # equal on all ranks
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return model.state_dict(), optimizer.gather_state_dict(), found

    for number, size in enumerate(sizes):
        shard = "none" if size == 1 else "optimizer"
        done = on_ranks(size, lambda comm, s=shard, n=number: body(comm, s, 2 * n, 2))
        states = copy.deepcopy(list(done[0][:2]))
        for slots in states[1]["state"].values():
            slots.update({slot: value.contiguous() for slot, value in slots.items()})  # as some formats save them
        losses += done[0][2]
    states = [None, None]
    alone = on_ranks(1, lambda comm: body(comm, "none", 0, 2 * len(sizes)))
    assert losses == pytest.approx(alone[0][2], rel=1e-5)


def test_residuals_are_saved_and_loaded() -> None:
    states: dict[int, Any] = {}

    def body(comm: ThreadComm) -> tuple[list[float], list[float]]:
        model, optimizer = make(comm, "optimizer", "momentum", "int8")
        train(comm, model, optimizer, range(3))
        residuals = copy.deepcopy(optimizer.exchange_state_dict())
        states[comm.rank] = copy.deepcopy(optimizer.gather_state_dict())
        saved = copy.deepcopy(model.state_dict())
        comm.barrier()
        uninterrupted = train(comm, model, optimizer, range(3, 6))
        model, optimizer = make(comm, "optimizer", "momentum", "int8")
        model.load_state_dict(saved)
        optimizer.load_state_dict(states[0])
        optimizer.load_exchange_state_dict(residuals)
        return uninterrupted, train(comm, model, optimizer, range(3, 6))

    for uninterrupted, resumed in on_ranks(2, body):
        assert resumed == uninterrupted


@per_rank(2)
def test_a_save_keeps_what_the_program_has_written(comm: ThreadComm) -> None:
    model, optimizer = make(comm, "optimizer", "momentum", "int8")
    train(comm, model, optimizer, range(2))
    model.embedding.weight.data[7] = 5.0
    optimizer.gather_state_dict()
    assert torch.equal(model.embedding.weight[7], torch.full((256,), 5.0))
    parameters = dict(model.named_parameters())
    for name, own in optimizer._hvdtrain_exchange.reducer.engine.owned().items():
        assert own.parameter is None or torch.equal(own.cut(parameters[name]), own.parameter), name


@per_rank(2)
def test_residuals_of_another_compression_are_delivered(comm: ThreadComm) -> None:
    def trained(shard: str, compression: str, loaded: Any) -> tuple[Tensor, Any]:
        model, optimizer = make(comm, shard, "momentum", compression)
        if loaded is not None:
            optimizer.load_exchange_state_dict(copy.deepcopy(loaded))
        train(comm, model, optimizer, [0])
        return model.layers[0].weight.detach(), copy.deepcopy(optimizer.exchange_state_dict())

    _, state = trained("none", "int8", None)
    without, whole, divided = (
        trained(s, "none", t)[0] for s, t in (("none", None), ("none", state), ("optimizer", state))
    )
    assert (whole - without).norm() > 0
    torch.testing.assert_close(divided - without, whole - without, rtol=1e-2, atol=2e-8)


@pytest.mark.parametrize("compression", ["none", "bf16"])
@per_rank(2)
def test_a_state_that_is_loaded_drops_the_step(comm: ThreadComm, compression: str) -> None:
    found = []
    for drops in (True, False):
        model, optimizer = make(comm, "optimizer", "momentum", compression)
        if drops:
            loss_of(model, comm.rank, 5).backward()
            optimizer.load_state_dict(OPTIMIZERS["momentum"](Model().parameters()).state_dict())
            model.zero_grad()
        loss_of(model, comm.rank, 0).backward()
        optimizer.step()
        found.append(model.embedding.weight)
    assert torch.equal(*found)


@per_rank(2)
def test_ranks_with_other_models_are_refused(comm: ThreadComm) -> None:
    model = nn.Linear(300, 300 + comm.rank)
    with pytest.raises(LaunchError, match="the model of rank 1"):
        distribute(comm, model, OPTIMIZERS["momentum"](model.parameters()), "optimizer")


def test_a_parameter_without_elements() -> None:
    def body(comm: ThreadComm, shard: str, loaded: Any) -> Any:
        model = Model()
        model.empty = nn.Parameter(torch.zeros(0, 3))
        optimizer = distribute(comm, model, OPTIMIZERS["adamw"](model.parameters()), shard)
        if loaded is not None:
            optimizer.load_state_dict(copy.deepcopy(loaded))
        for step in range(2):
            optimizer.zero_grad()
            (loss_of(model, comm.rank, step) + model.empty.sum()).backward()
            optimizer.step()
        return optimizer.gather_state_dict(), model.embedding.weight.detach()

    state = on_ranks(2, lambda comm: body(comm, "none", None))[0][0]
    assert not all(slot.numel() for slots in state["state"].values() for slot in slots.values())
    whole, divided = (on_ranks(2, lambda comm, s=s: body(comm, s, state))[0][1] for s in ("none", "optimizer"))
    assert torch.equal(whole, divided)
