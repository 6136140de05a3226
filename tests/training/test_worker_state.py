"""The state that a process offers to the next round after a rank of this round died."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hvdtrain.comm.solo import SoloComm
from hvdtrain.compression.feedback import RESIDUAL
from hvdtrain.config.parse import parse_object
from hvdtrain.engine.make import make_engine
from hvdtrain.observe.progress import Progress as Display
from hvdtrain.observe.recorder import Recorder
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.training.elastic.worker_state import NOTHING, WorkerState, make_worker_state
from tests.support.toy import toy

DIVIDED = "divided"


@pytest.fixture
def worker(request: pytest.FixtureRequest) -> Iterator[WorkerState]:
    """After a step under the test's parameter, a compression or `DIVIDED`."""
    run = parse_object({"task": "toy", "optimizer": {"name": "sgd", "lr": 0.1}}, None)
    torch.manual_seed(0)
    found = make_worker_state(run, toy(dropout=0.0), torch.device("cpu"), RankInfo())
    compression, shard = ("none", "gradients") if request.param == DIVIDED else (request.param, "none")
    engine = make_engine(found.state.optimizer, found.state.model, SoloComm(), compression, shard=shard, elastic=True)
    found.state.exchange = engine
    found.step = 0  # as of the beginning of a round
    _step(found)
    yield found
    engine.close()


def _step(worker: WorkerState) -> None:
    engine: Any = worker.state.exchange
    engine.begin(1)
    engine.backward(worker.state.model(torch.ones(2, 6)).square().sum())
    engine.finish()
    engine.step()
    engine.commit(applied=True)
    worker.state.progress.step += 1


def _held(worker: WorkerState) -> torch.Tensor:
    """Weights and residuals."""
    tensors, _ = worker.state.exchange.state_dict()  # type: ignore[union-attr]
    residuals = [tensor for name, tensor in sorted(tensors.items()) if name.endswith(RESIDUAL)]
    return torch.cat([tensor.detach().flatten() for tensor in [*worker.state.model.parameters(), *residuals]]).clone()


@pytest.mark.parametrize(("engine", "device"), [("horovod", "meta"), ("fsdp", "cpu")])
def test_an_engine_that_divides_the_model_moves_it_block_by_block(engine: str, device: str) -> None:
    """The whole need not fit on a device. The test uses torch's "meta" device."""
    run = parse_object({"task": "toy", "parallel": {"engine": engine}}, None)
    found = make_worker_state(run, toy(), torch.device("meta"), RankInfo())
    assert {parameter.device.type for parameter in found.state.model.parameters()} == {device}


@pytest.mark.parametrize(
    ("worker", "synchronized", "restores"),
    [
        # Without residuals nothing is lost with a rank.
        *[("none", [False], False), ("bf16", [False], False)],
        *[("topk:0.2", [False], True), ("powersgd:2", [False], True), ("topk:0.2", [True], False)],
        # A round that breaks before its first step. A commit is long ago, as where one rank is left.
        ("topk:0.2", [True, False], False),
    ],
    indirect=["worker"],
)
def test_a_broken_round_restores_residuals_and_weights_of_the_newest_commit(
    worker: WorkerState, synchronized: list[bool], restores: bool
) -> None:
    worker.commits.commit(worker.state)
    committed = _held(worker)
    _step(worker)
    now = _held(worker)
    assert not torch.equal(committed, now)
    for each in synchronized:
        worker.end_round(synchronized=each)
    assert worker.step == (1 if restores else 2)
    assert torch.equal(_held(worker), committed if restores else now)


@pytest.mark.parametrize("synchronized", [False, True])
@pytest.mark.parametrize("worker", [DIVIDED], indirect=True)
def test_where_ranks_hold_pieces_the_newest_commit_counts(worker: WorkerState, synchronized: bool) -> None:
    worker.commits.commit(worker.state)
    _step(worker)
    worker.end_round(synchronized=synchronized)
    assert worker.step == worker.offer()[0] == 1


@pytest.mark.parametrize("worker", ["topk:0.2", DIVIDED], indirect=True)
def test_where_there_is_no_commit_there_is_nothing_to_offer(worker: WorkerState) -> None:
    worker.end_round(synchronized=False)
    assert worker.offer() == (NOTHING, "")


@pytest.mark.parametrize("worker", ["none"], indirect=True)
def test_a_rank_that_never_had_the_state_offers_none(worker: WorkerState) -> None:
    worker.step = NOTHING  # it has a model as the task made it, and rank 0 was lost before it gave its own
    worker.end_round(synchronized=False)
    assert worker.offer() == (NOTHING, "")


@pytest.mark.parametrize("worker", ["none"], indirect=True)
def test_offers_are_equal_where_all_but_tensors_is(worker: WorkerState) -> None:
    worker.end_round(synchronized=False)
    before = worker.offer()
    assert before == worker.offer()
    worker.state.progress.losses = [1.0]  # such as a rank lacks that was lost in the midst of looking at the step
    assert worker.offer()[0] == before[0] and worker.offer() != before


@pytest.mark.parametrize("worker", ["topk:0.2"], indirect=True)
def test_records_of_repeated_steps_start_again(worker: WorkerState) -> None:
    worker.recorder = Recorder(None, Display("samples", 5.0, live=False, quiet=True))
    worker.commits.commit(worker.state)
    worker.last_record = {"step": 1}
    worker.end_round(synchronized=True)
    assert not worker.lost_recorded_steps()
    worker.step = worker.state.progress.step = 2
    worker.last_record = {"step": 3}
    worker.end_round(synchronized=False)
    assert worker.lost_recorded_steps()
    worker.close_recorder()
    assert worker.recorder is None
