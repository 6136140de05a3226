"""Frozen parameters that a task makes again: checkpoints leave them out, and no value is ever lost silently."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from hvdtrain import Task
from hvdtrain.errors import CheckpointError, TaskError
from hvdtrain.state.frozen import find_frozen
from hvdtrain.state.sync import broadcast_state
from hvdtrain.state.train_state import Progress, TrainState
from hvdtrain.training.diagnostics.drift import check_frozen
from tests.support.thread_comm import ThreadComm, on_ranks
from tests.support.thread_job import train_on_threads


class Model(nn.Module):
    """A frozen embedding that is tied to the head, a frozen layer with a trained bias, a trained layer."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("count", torch.zeros(1))
        for frozen in (self.embedding.weight, self.first.weight):
            frozen.requires_grad_(False)


LEFT_OUT = {"embedding.weight", "head.weight", "first.weight"}


def _state(seed: int = 1, *, remade: bool = True) -> TrainState:
    model = Model(seed)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    state = TrainState(model, optimizer, torch.amp.GradScaler(enabled=False), Progress())
    state.frozen = find_frozen(model) if remade else None
    return state


def test_a_checkpoint_has_all_but_the_frozen_parameters() -> None:
    state = _state()
    saved = state.state_dict()
    assert set(saved.tensors["model"]) == set(state.model.state_dict()) - LEFT_OUT
    assert saved.values["frozen"]["tensors"] == 3 and saved.values["aliases"] == {}
    assert set(_state(remade=False).state_dict().tensors["model"]) == set(state.model.state_dict()) - {"head.weight"}
    state.model.second.weight.data += 1
    other = _state()
    other.load_state_dict(state.state_dict())
    assert all(torch.equal(t, other.model.state_dict()[name]) for name, t in state.model.state_dict().items())
    assert find_frozen(nn.Linear(2, 2)) is None


CHANGES: dict[str, Callable[[Model], object]] = {
    "a value": lambda model: model.first.weight.data[0].add_(1e-6),
    "a tied value": lambda model: model.head.weight.data[0].add_(1e-6),
    "a dtype": lambda model: model.first.to(torch.float64),
    "one more": lambda model: model.second.weight.requires_grad_(False),
    "one fewer": lambda model: model.first.weight.requires_grad_(True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_base_is_refused(change: str) -> None:
    saved, other = _state().state_dict(), _state()
    CHANGES[change](other.model)  # type: ignore[arg-type]
    other.frozen = find_frozen(other.model)
    before = {name: t.clone() for name, t in other.model.state_dict().items()}
    with pytest.raises(CheckpointError, match="frozen"):
        other.load_state_dict(saved)
    assert all(torch.equal(t, before[name]) for name, t in other.model.state_dict().items())


def test_checkpoints_with_and_without_frozen_parameters_do_not_mix() -> None:
    with pytest.raises(CheckpointError, match="only the trained parameters"):
        _state(remade=False).load_state_dict(_state().state_dict())
    with pytest.raises(CheckpointError, match="all parameters of its run"):
        _state().load_state_dict(_state(remade=False).state_dict())


def test_a_save_needs_frozen_parameters_as_they_were() -> None:
    """One that thaws or changes would be lost; one that is frozen later is saved still."""
    state = _state()
    check_frozen(state)
    check_frozen(state)
    state.model.second.requires_grad_(False)
    assert "second.weight" in state.state_dict().tensors["model"]
    state.model.embedding.weight.data[2, 1] += 1e-6  # type: ignore[union-attr,index,operator]
    with pytest.raises(TaskError, match=r"embedding\.weight"):
        check_frozen(state)
    check_frozen(_state(remade=False))
    state.model.first.weight.requires_grad_(True)  # type: ignore[union-attr]
    with pytest.raises(TaskError, match=r"first\.weight"):
        state.state_dict()


@pytest.mark.parametrize("from_checkpoint", [False, True])
def test_all_ranks_get_the_base_of_the_rank_that_sends(from_checkpoint: bool) -> None:
    """Though another CPU may have made other values of the same seed; then their checkpoints have its digest, too."""
    source = _state(1).state_dict() if from_checkpoint else None

    def body(comm: ThreadComm) -> TrainState:
        state = _state(1 + comm.rank)
        broadcast_state(state, comm, source=source if comm.rank == 0 else None)
        return state

    one, two = on_ranks(2, body)
    assert all(torch.equal(t, two.model.state_dict()[name]) for name, t in one.model.state_dict().items())
    assert one.state_dict().values == two.state_dict().values
    two.load_state_dict(_state(1).state_dict())


def test_training_that_changes_a_frozen_parameter_ends_before_it_saves(tmp_path: Path) -> None:
    def build(rank: int) -> Task:
        def loss(model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
            model.first.weight.data[0] += 1e-3  # type: ignore[union-attr,index,operator]
            return model.second(model.first(batch[0])).sum(), 1  # type: ignore[operator]

        data = torch.utils.data.TensorDataset(torch.ones(8, 3))
        return Task(Model(), loss, data, remakes_frozen=True)

    options = ("--train.global_batch=4", "--train.micro_batch=2", "--train.steps=2", f"--run_dir={tmp_path}")
    with pytest.raises(TaskError, match=r"first\.weight was frozen"):
        train_on_threads(*options, size=2, build=build)
    assert not [*tmp_path.glob("checkpoints/step-*")]
