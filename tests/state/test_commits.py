"""Commits cost next to nothing, lose little, and give back what was."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hvdtrain.engine.make import make_engine
from hvdtrain.plan.plan import Plan
from hvdtrain.state.snapshot import MAX_COST, Commits, is_commit_due
from hvdtrain.state.train_state import Progress, TrainState
from tests.support.checkpoints import same_state
from tests.support.thread_comm import ThreadComm, on_ranks

SECONDS = st.floats(1e-4, 10.0)


@given(SECONDS, st.floats(0.0, 2.0), st.floats(0.1, 1000.0))
def test_commits_take_their_share_or_lose_no_more_than_is_allowed(step_s: float, cost_s: float, loss_s: float) -> None:
    now_s, steps = 0.0, 0
    while not is_commit_due(now_s, step_s, cost_s, loss_s) and steps < 100_000:
        now_s, steps = now_s + step_s, steps + 1
    now_s += step_s  # the step that ends with it
    assert cost_s <= MAX_COST * now_s * 1.001 or now_s + step_s >= loss_s * 0.999 or steps == 100_000
    assert now_s <= max(loss_s, 2 * step_s) * 1.001, "so much is lost at most"


@given(SECONDS, st.floats(0.0, 0.5))
def test_no_commit_waits_for_longer_than_it_has_to(step_s: float, cost_s: float) -> None:
    wait_s = cost_s / MAX_COST
    assert is_commit_due(wait_s, step_s, cost_s, 1e9)
    assert not is_commit_due(wait_s - 2 * step_s, step_s, cost_s, 1e9) or wait_s <= step_s


class Average:
    """A callback that changes its tensors in place; one has the name of a parameter."""

    def __init__(self, model: nn.Linear) -> None:
        self.kept: Mapping[str, torch.Tensor] = {"weight": model.weight.detach().clone(), "count": torch.zeros(1)}

    def add(self, model: nn.Linear) -> None:
        self.kept["weight"].lerp_(model.weight.detach(), 0.1)
        self.kept["count"].add_(1)

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        return self.kept

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self.kept = state


def _state(model: nn.Linear | None = None) -> TrainState:
    model = model or nn.Linear(3, 2)
    scaler, extras = torch.amp.GradScaler(enabled=False), {"average": Average(model)}
    return TrainState(model, torch.optim.Adam(model.parameters()), scaler, Progress(), extras=extras)


def _step(state: TrainState) -> None:
    state.extras["average"].add(state.model)  # type: ignore[attr-defined]
    state.optimizer.zero_grad()
    state.model(torch.randn(4, 3)).square().sum().backward()
    state.optimizer.step()
    state.progress.step += 1


def test_a_commit_gives_back_all_of_the_state_more_than_once() -> None:
    commits, state = Commits(60.0, lambda: 0.0), _state()
    assert commits.step == -1
    assert commits.due()
    for _ in range(3):
        _step(state)
    commits.commit(state)
    assert commits.step == 3
    kept = copy.deepcopy(state.state_dict())
    for _ in range(2):
        for _ in range(2):
            _step(state)
        commits.restore(state)
        assert same_state(state.state_dict(), kept)


def test_a_step_that_is_long_brings_the_next_commit_forward() -> None:
    now = [0.0]
    commits, state = Commits(60.0, lambda: now[0]), _state()

    def slow() -> float:
        now[0] += 1.0  # a commit takes a second: the share alone would have it wait for 100
        return now[0]

    commits._clock = slow
    commits.commit(state)
    commits._clock = lambda: now[0]
    commits.due()
    now[0] += 10.0
    assert not commits.due()
    now[0] += 30.0
    assert commits.due(), "40 s have passed, and another step of 30 would lose too much"


def test_commits_do_not_change_training_and_are_equal_on_all_ranks() -> None:
    model, samples = nn.Linear(3, 2), torch.randn(2, 4, 4, 3)

    def train(comm: ThreadComm, commits: Commits | None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        state = _state(copy.deepcopy(model))
        engine = make_engine(state.optimizer, state.model, comm, Plan(compression="topk:0.2"))
        state.exchange = engine
        for step in range(4):
            engine.begin(1)
            engine.backward(state.model(samples[comm.rank, step]).square().sum())
            engine.finish()
            engine.step()
            engine.commit(applied=True)
            if commits is not None:
                commits.commit(state)
        trained = [t.detach().clone() for tensors in state.state_dict().tensors.values() for t in tensors.values()]
        if commits is not None:
            commits.restore(state)
        owed = [tensor.clone() for tensor in engine.state_dict()[0].values()]
        engine.close()
        return trained, owed

    undisturbed = on_ranks(2, lambda comm: train(comm, None))
    disturbed = on_ranks(2, lambda comm: train(comm, Commits(60.0)))
    for (alone, owed), (beside, _) in zip(undisturbed, disturbed, strict=True):
        assert any(tensor.count_nonzero() for tensor in owed)
        assert all(map(torch.equal, alone, beside))
    assert all(map(torch.equal, disturbed[0][1], disturbed[1][1]))
