"""The state of rank 0 reaches every rank; differences are named."""

from __future__ import annotations

import pytest
import torch

from hvdtrain.comm.base import Comm
from hvdtrain.engine.base import Engine
from hvdtrain.engine.divisible import DividedSums
from hvdtrain.errors import LaunchError
from hvdtrain.exchange.residuals import residual_key
from hvdtrain.state.exchange_state import Owned
from hvdtrain.state.pieces import StateDict
from hvdtrain.state.sync import broadcast_state
from hvdtrain.state.train_state import Progress, TrainState
from tests.support.toy import Net


def _state(hidden: int, seed: int, steps: int) -> TrainState:
    torch.manual_seed(seed)
    model = Net(hidden, 0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(3, 6)).sum().backward()
        optimizer.step()
    return TrainState(model, optimizer, torch.amp.GradScaler("cpu", enabled=False), Progress(step=steps, position=7))


def test_broadcast_makes_states_equal(job: Comm) -> None:
    state = _state(8, seed=job.rank, steps=3 if job.rank == 0 else job.rank % 2)
    moves: list[int] = []
    broadcast_state(state, job, lambda: moves.append(1))
    assert len(moves) >= len(state.state_dict().tensors["model"]), "with each tensor"
    expected = _state(8, seed=0, steps=3).state_dict()
    found = state.state_dict()
    assert found.values == expected.values
    for group in ("model", "optimizer"):
        assert found.tensors[group].keys() == expected.tensors[group].keys()
        assert all(torch.equal(found.tensors[group][n], expected.tensors[group][n]) for n in found.tensors[group])


@pytest.mark.parametrize("loaded", [False, True])
def test_placed_parameters_are_not_sent_again(job: Comm, loaded: bool) -> None:
    """All else is, and parameters that were loaded after they had been placed."""
    state, source = _state(8, seed=job.rank, steps=2), _state(8, seed=0, steps=2).state_dict()
    state.model.register_buffer("number", torch.tensor([float(job.rank)]))
    tensors = {**source.tensors, "model": {**source.tensors["model"], "number": torch.zeros(1)}}
    broadcast_state(
        state, job, source=StateDict(tensors, source.values) if loaded and job.rank == 0 else None, placed=True
    )
    of = _state(8, seed=0 if loaded or job.rank == 0 else job.rank, steps=2).state_dict().tensors["model"]
    found = state.state_dict().tensors
    assert all(torch.equal(found["model"][name], tensor) for name, tensor in of.items())
    assert found["model"]["number"].item() == 0
    assert all(torch.equal(found["optimizer"][name], t) for name, t in source.tensors["optimizer"].items())


def test_residuals_of_several_ranks_are_loaded_as_their_sum(job: Comm) -> None:
    """Each rank multiplies what it gets: that of rank 0 is not sent once more after it has been."""
    state, saved = _state(8, seed=0, steps=2), _state(8, seed=0, steps=2).state_dict()
    sums = DividedSums(state.model, job)
    sums._owned = {name: Owned(parameter) for name, parameter in state.model.named_parameters()}
    state.exchange = Engine(state.optimizer, sums)
    name = next(iter(sums._owned))
    source = StateDict(
        {**saved.tensors, "exchange": {residual_key(name): torch.ones(2)}},
        {**saved.values, "exchange": {"plan": None, "ranks": 3}},
    )
    if job.rank == 0:
        state.load_state_dict(source)
    broadcast_state(state, job, source=source if job.rank == 0 else None)
    assert sums._undelivered.sums[name].tolist() == [3, 3]


def test_another_model_is_named_on_every_rank(job: Comm) -> None:
    state = _state(8 + job.rank, seed=0, steps=0)
    if job.size == 1:
        broadcast_state(state, job)
        return
    with pytest.raises(LaunchError, match=r"rank 1 differs from that of rank 0: layers\.0\.bias") as caught:
        broadcast_state(state, job)
    assert caught.value.found == "[[9], 'torch.float32']"
