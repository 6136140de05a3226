"""What a process offers to the ranks of the next round, where one of this round is gone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hvdtrain.comm.base import Comm
from hvdtrain.comm.solo import SoloComm
from hvdtrain.compression.feedback import RESIDUAL
from hvdtrain.config.parse import parse_object
from hvdtrain.engine.make import make_engine
from hvdtrain.observe.progress import Progress as Display
from hvdtrain.observe.recorder import Recorder
from hvdtrain.runtime.driver_client import JobFailed
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.training.elastic.worker_state import NOTHING, WorkerState, keep
from tests.support.toy import toy


@pytest.fixture
def kept(request: pytest.FixtureRequest) -> Iterator[WorkerState]:
    """After a step under the compression of the test's parameter."""
    run = parse_object({"task": "toy", "optimizer": {"name": "sgd", "lr": 0.1}}, None)
    torch.manual_seed(0)
    found = keep(run, toy(dropout=0.0), torch.device("cpu"), RankInfo())
    engine = make_engine(found.state.optimizer, found.state.model, SoloComm(), request.param)
    found.state.exchange = engine
    found.step = 0  # as of the beginning of a round
    _step(found)
    yield found
    engine.close()


def _step(kept: WorkerState) -> None:
    engine, model = kept.state.exchange, kept.state.model
    engine.begin(1)  # type: ignore[union-attr]
    engine.backward(model(torch.ones(2, 6)).square().sum())  # type: ignore[union-attr]
    engine.finish()  # type: ignore[union-attr]
    engine.step()  # type: ignore[union-attr]
    engine.commit(applied=True)  # type: ignore[union-attr]
    kept.state.progress.step += 1


def _weights(kept: WorkerState) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in kept.state.model.parameters()])


def _residuals(kept: WorkerState) -> torch.Tensor:
    tensors, _ = kept.state.exchange.state_dict()  # type: ignore[union-attr]
    return torch.cat([t.flatten() for name, t in sorted(tensors.items()) if name.endswith(RESIDUAL)]).clone()


@pytest.mark.parametrize("kept", ["none", "bf16"], indirect=True)
def test_without_residuals_nothing_is_lost_with_a_rank(kept: WorkerState) -> None:
    kept.commits.commit(kept.state)
    _step(kept)
    now = _weights(kept)
    kept.round_is_over(settled=False)
    assert kept.step == 2
    assert torch.equal(_weights(kept), now)


@pytest.mark.parametrize("kept", ["topk:0.2", "powersgd:2"], indirect=True)
def test_what_a_rank_owed_is_that_of_the_newest_commit(kept: WorkerState) -> None:
    kept.commits.commit(kept.state)
    weights, residuals = _weights(kept).clone(), _residuals(kept)
    assert residuals.abs().sum() > 0
    _step(kept)
    assert not torch.equal(_weights(kept), weights)
    kept.round_is_over(settled=False)
    assert kept.step == 1
    assert torch.equal(_weights(kept), weights)
    assert torch.equal(_residuals(kept), residuals)


@pytest.mark.parametrize("kept", ["topk:0.2"], indirect=True)
def test_what_was_settled_is_kept(kept: WorkerState) -> None:
    kept.commits.commit(kept.state)
    _step(kept)
    weights, residuals = _weights(kept), _residuals(kept)
    kept.round_is_over(settled=True)
    assert kept.step == 2
    assert torch.equal(_weights(kept), weights)
    assert torch.equal(_residuals(kept), residuals)


@pytest.mark.parametrize("kept", ["topk:0.2"], indirect=True)
def test_a_round_that_breaks_before_its_first_step_costs_nothing_of_the_one_before(kept: WorkerState) -> None:
    kept.commits.commit(kept.state)
    _step(kept)  # a commit is long ago, as where one rank is left that exchanges nothing
    weights, residuals = _weights(kept).clone(), _residuals(kept)
    kept.round_is_over(settled=True)
    kept.round_is_over(settled=False)
    assert kept.step == 2
    assert torch.equal(_weights(kept), weights)
    assert torch.equal(_residuals(kept), residuals)


@pytest.mark.parametrize("kept", ["topk:0.2"], indirect=True)
def test_where_there_is_no_commit_there_is_nothing_to_offer(kept: WorkerState) -> None:
    kept.round_is_over(settled=False)
    assert kept.offer() == (NOTHING, "")


@pytest.mark.parametrize("kept", ["none"], indirect=True)
def test_who_never_had_the_state_of_the_run_has_nothing_to_offer(kept: WorkerState) -> None:
    kept.step = NOTHING  # it has a model as the task made it, and rank 0 was lost before it gave its own
    kept.round_is_over(settled=False)
    assert kept.offer() == (NOTHING, "")


@pytest.mark.parametrize("kept", ["none"], indirect=True)
def test_offers_are_equal_where_all_but_tensors_is(kept: WorkerState) -> None:
    kept.round_is_over(settled=False)
    before = kept.offer()
    assert before == kept.offer()
    kept.state.progress.losses = [1.0]  # such as a rank lacks that was lost in the midst of looking at the step
    assert kept.offer()[0] == before[0] and kept.offer() != before


@pytest.mark.parametrize("kept", ["topk:0.2"], indirect=True)
def test_records_of_steps_that_are_done_again_are_begun_anew(kept: WorkerState, tmp_path: Path) -> None:
    kept.recorder = Recorder(None, Display("samples", 5.0, live=False, quiet=True))
    kept.commits.commit(kept.state)
    kept.last = {"step": 1}
    kept.round_is_over(settled=True)
    assert not kept.went_back()
    _step(kept)
    kept.last = {"step": 2}
    kept.round_is_over(settled=False)
    assert kept.went_back()
    kept.close_recorder()
    assert kept.recorder is None


class _NoRounds:
    """A driver that has given up."""

    def enter(self, why: str, text: str, step: int) -> Comm:
        raise JobFailed("too many rounds")


@pytest.mark.parametrize("kept", ["none"], indirect=True)
@pytest.mark.parametrize(("settled", "cards"), [(False, 1), (True, 0)])
def test_a_card_is_written_of_a_round_that_broke_alone(kept: WorkerState, settled: bool, cards: int) -> None:
    told: list[int] = []
    kept.given_up = lambda: told.append(1)
    kept.round_is_over(settled=settled)
    with pytest.raises(JobFailed):
        kept.enter(_NoRounds(), "failed", "")  # type: ignore[arg-type]
    assert len(told) == cards
