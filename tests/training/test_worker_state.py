"""Rounds of a job: what a process offers to the next after a lost rank, and what a round leaves and frees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hvdtrain.comm.rounds import OneRound, Rounds
from hvdtrain.comm.solo import SoloComm
from hvdtrain.compression.feedback import RESIDUAL
from hvdtrain.config.parse import parse_object
from hvdtrain.config.schema import Config
from hvdtrain.data.loader import Stream
from hvdtrain.engine.make import make_engine
from hvdtrain.exchange.bucket_exchange import BucketExchange
from hvdtrain.observe.journal import Journal
from hvdtrain.observe.output import Progress as Display
from hvdtrain.observe.sinks import Recorder
from hvdtrain.plan.plan import plan_of
from hvdtrain.run_layout import RunLayout
from hvdtrain.runtime.driver_client import JobFailed
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.runtime.tuning import TimelinePlan
from hvdtrain.spans import Spans
from hvdtrain.state.checkpoint_store import CheckpointStore
from hvdtrain.state.ledger import Ledger, next_start
from hvdtrain.state.train_state import Progress
from hvdtrain.training import session
from hvdtrain.training.elastic.worker_state import NOTHING, WorkerState, make_worker_state
from hvdtrain.training.loop.feed import begin_start
from hvdtrain.training.round import Round
from hvdtrain.training.start.restore import resume_state
from hvdtrain.training.start.run_directory import claim_run_directory
from tests.support.journals import read_journal
from tests.support.thread_comm import ThreadComm, on_ranks
from tests.support.toy import toy

DIVIDED = "divided"


@pytest.fixture
def worker(request: pytest.FixtureRequest) -> Iterator[WorkerState]:
    """After a step under the test's parameter, a compression or `DIVIDED`."""
    run = parse_object({"task": "toy", "optimizer": {"name": "sgd", "lr": 0.1}}, None)
    torch.manual_seed(0)
    found = make_worker_state(run, plan_of(run.config, elastic=True), toy(dropout=0.0), torch.device("cpu"), RankInfo())
    compression, shard = ("none", "gradients") if request.param == DIVIDED else (request.param, "none")
    plan = replace(found.plan, compression=compression, shard=shard)
    engine = make_engine(found.state.optimizer, found.state.model, SoloComm(), plan)
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
    tensors, _ = worker.state.exchange.state_dict()  # type: ignore[union-attr]
    residuals = [tensor for name, tensor in sorted(tensors.items()) if name.endswith(RESIDUAL)]
    return torch.cat([tensor.detach().flatten() for tensor in [*worker.state.model.parameters(), *residuals]]).clone()


@pytest.mark.parametrize(("engine", "device"), [("horovod", "meta"), ("fsdp", "cpu")])
def test_an_engine_that_divides_the_model_moves_it_block_by_block(engine: str, device: str) -> None:
    """The whole need not fit on a device. The test uses torch's "meta" device."""
    run = parse_object({"task": "toy", "parallel": {"engine": engine}}, None)
    found = make_worker_state(run, plan_of(run.config), toy(), torch.device("meta"), RankInfo())
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


@pytest.mark.parametrize(("worker", "had"), [("topk:0.2", True), (DIVIDED, True), ("none", False)], indirect=["worker"])
def test_without_a_commit_or_a_state_there_is_nothing_to_offer(worker: WorkerState, had: bool) -> None:
    if not had:  # it has a model as the task made it, and rank 0 was lost before it gave its own
        worker.step = NOTHING
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
    opened: Any = (SimpleNamespace(config=Config()), SimpleNamespace(rank=1), RunLayout(Path()))
    assert not worker.open_recorder(*opened)
    worker.step = worker.state.progress.step = 2
    worker.last_record = {"step": 3}
    worker.end_round(synchronized=False)
    assert worker.open_recorder(*opened)
    worker.close_recorder()
    assert worker.recorder is None


class _LostRank(Exception):
    pass


class _Rounds(Rounds):
    """Of one rank each. The driver gives up after `most`; a rank is lost after the second step of the first."""

    elastic = True

    def __init__(self, most: int) -> None:
        super().__init__(SoloComm())
        self.left, self.steps = most, 0

    def enter(self, why: str, text: str = "", step: int = -1) -> SoloComm:
        if not self.left:
            raise JobFailed("too many rounds")
        self.left -= 1
        return SoloComm()

    def is_over(self, error: BaseException) -> bool:
        return isinstance(error, _LostRank)

    def requests(self, requests: list[int], changed: int, terminate: int) -> list[int]:
        self.steps += 1
        if self.steps == 3:  # the gradients of the second step are still there
            raise _LostRank
        return requests


@pytest.mark.parametrize(("last_failed", "cards"), [(True, ["second"]), (False, [])])
def test_a_card_is_written_of_the_last_round_alone_and_only_if_it_failed(
    monkeypatch: pytest.MonkeyPatch, last_failed: bool, cards: list[str]
) -> None:
    written: list[str] = []
    names = iter(["first", "second"])

    def train(current: session.Round, *given: object) -> None:
        name = next(names)
        current.reporter = SimpleNamespace(report_no_new_round=lambda: written.append(name))
        if name == "first" or last_failed:
            raise _LostRank

    monkeypatch.setattr(session, "_train_round", train)
    run = parse_object({"task": "toy"}, None)
    with pytest.raises(JobFailed):
        session.run_training(run, toy, _Rounds(2), None, RankInfo())  # type: ignore[arg-type]
    assert written == cards


def watch_buffers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by the number of older buffers that are alive when a reducer makes new buckets."""
    alive: list[int] = []
    older: list[StorageWeakRef] = []
    make = BucketExchange.__init__

    def watched(self: BucketExchange, *arguments: Any, **keywords: Any) -> None:
        alive.append(sum(not storage.expired() for storage in older))
        make(self, *arguments, **keywords)
        older.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in self.buffers())

    monkeypatch.setattr(BucketExchange, "__init__", watched)
    return alive


@pytest.mark.parametrize("compression", ["bf16", "topk:0.5"])
def test_a_round_frees_the_buckets_of_the_last_one_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compression: str
) -> None:
    alive = watch_buffers(monkeypatch)
    options = {"run_dir": str(tmp_path / "run"), "parallel": {"compression": compression}, "train": {"steps": 4}}
    run = parse_object({"task": "toy", **options}, None)
    result = session.run_training(run, toy, _Rounds(2), TimelinePlan("off"), RankInfo(folder=tmp_path))
    assert result.step == 4 and len(alive) >= 2
    # The new bucket takes the residual over from the copy of it, which is then freed.
    assert not any(alive)


@pytest.mark.parametrize("moved", [True, False])
def test_a_run_folder_left_on_another_host_is_reported_and_can_be_resumed(moved: bool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = parse_object({"task": "toy", "run_dir": str(folder)}, None)
    claim = claim_run_directory(run)
    if not moved:
        claim.write_config(run)
    worker = make_worker_state(run, plan_of(run.config), toy(), torch.device("cpu"), RankInfo())
    worker.step = worker.state.progress.step = 7
    display = Display("samples", 5.0, live=False, quiet=True)
    recorder = Recorder(Journal(folder / "journal.jsonl", display.say), display)
    store = CheckpointStore(folder / "checkpoints", pytest.fail)
    current = Round(run, worker, OneRound(SoloComm()), SoloComm())
    current.store, current.claim, current.recorder, current.spans = store, claim, recorder, Spans()
    assert resume_state(current) == 7
    recorder.close()
    claim.release()
    events = [line["event"] for line in read_journal(folder / "journal.jsonl")]
    assert events == (["warning"] if moved else []) + ["resumed"]
    assert claim.old_config() is not None


@pytest.mark.parametrize("ahead", [0, 1])
def test_hosts_that_share_no_files_do_not_write_into_those_of_an_earlier_start(ahead: int, tmp_path: Path) -> None:
    """One of two hosts was in starts that the other was not in, as where the ranks of a whole host are lost."""

    def begin(comm: ThreadComm) -> None:
        comm.local_rank, comm.local_size = 0, 1
        folder = tmp_path / str(comm.rank)
        folder.mkdir()
        (folder / "before.jsonl").write_text(f"\n[{2 if comm.rank == ahead else 0},0,1,[],0]")
        ledger = Ledger(folder, pytest.fail)
        stream = Stream([0] * 9, 7, 4, 2, comm.rank, comm.size)  # type: ignore[arg-type]
        begin_start(ledger, comm, stream, Progress(samples=9), "started")
        ledger.close()

    on_ranks(2, begin)
    assert [next_start(tmp_path / str(rank)) for rank in range(2)] == [4, 4]
