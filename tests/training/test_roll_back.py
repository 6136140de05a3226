"""Training that was spoiled goes back and past what did it: the same way whenever commits were taken, and resumed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hvdtrain
from hvdtrain.comm.solo import SoloComm
from hvdtrain.data.order import positions_without
from hvdtrain.errors import NonFiniteError
from hvdtrain.observe.past_journal import read_steps
from hvdtrain.state.checkpoint_store import CheckpointStore
from hvdtrain.state.snapshot import Commits
from hvdtrain.state.train_state import Progress, TrainState
from hvdtrain.training.elastic.roll_back import RollBack, SpoiledSteps, first_position, merge_ranges
from hvdtrain.verify.data import verify_data
from hvdtrain.verify.resume import Outcome, compare
from tests.support.journals import read_events
from tests.support.thread_comm import ThreadComm, on_ranks
from tests.support.thread_job import train_on_threads
from tests.support.toys import spoiled

NAN = float("nan")
pytestmark = pytest.mark.usefixtures("own_folder")


def _task(at: Sequence[int] = (300,), value: float = 1000.0) -> hvdtrain.Task:
    torch.manual_seed(1)
    return spoiled(at, value)


def _train(
    run: str, task: hvdtrain.Task, policy: str = "both", loss_s: float = 60.0, every: int = 0, **more: Any
) -> None:
    steps = {"steps": 50, "global_batch": 8, "micro_batch": 2, "max_skipped": 3, **more}
    elastic = {"roll_back": policy, "loss_s": loss_s}
    hvdtrain.train({"train": steps, "elastic": elastic, "checkpoint": {"every": every}, "run_dir": run}, task)


def _outcome(run: str) -> Outcome:
    steps = read_steps(Path(run, "journal.jsonl"))
    newest = CheckpointStore(Path(run, "checkpoints"), pytest.fail).load_newest()
    assert newest is not None
    lines = [steps[step] for step in sorted(steps)]
    return Outcome([line["loss"] for line in lines], [line["position"] for line in lines], newest[1])


def _back(run: str) -> list[dict[str, Any]]:
    return read_events(run, "rolled_back")


def _proven(run: str) -> list[tuple[int, int]]:
    report = verify_data(Path(run))
    assert report.wrong == []
    return report.left_out


def test_a_spike_is_skipped_whenever_commits_are_taken() -> None:
    _train("often", _task(), loss_s=0.0)
    _train("seldom", _task(), loss_s=1e9)
    often, seldom = _back("often"), _back("seldom")
    assert [(e["from_step"], e["to_step"], e["positions"]) for e in often] == [(38, 37, [296, 304])]
    assert [(e["from_step"], e["positions"]) for e in seldom] == [(38, [296, 304])]
    assert compare("", _outcome("often"), _outcome("seldom"), exact=True).first is None
    assert max(loss for loss in _outcome("often").losses if loss is not None) < 1000
    assert _proven("often") == _proven("seldom") == [(296, 304)]


def test_a_resumed_run_goes_the_same_way() -> None:
    _train("whole", _task(), every=5, loss_s=0.0)
    for stop in (37, 38, 45, None):
        _train("parts", _task(), every=5, loss_s=0.0, stop_at=stop)
    assert compare("", _outcome("parts"), _outcome("whole"), exact=True).first is None
    assert _proven("parts") == [(296, 304)]


def test_non_finite_steps_are_skipped_where_the_run_would_end() -> None:
    _train("run", _task(range(300, 320), NAN), policy="non_finite", every=3)
    (event,) = _back("run")
    assert (event["from_step"], event["positions"]) == (40, [296, 320])
    assert event["to_step"] <= 37
    assert _proven("run") == [(296, 320)]
    assert read_steps(Path("run/journal.jsonl"))[38]["position"] == 328
    aside = [path.name.partition("step-")[2] for path in Path("run/checkpoints").glob("set-aside-*")]
    assert aside == ["000039"], "what was saved amid them"


@pytest.mark.parametrize("policy", ["never", "spikes"])
def test_faults_outside_of_the_policy_end_the_run(policy: str) -> None:
    with pytest.raises(NonFiniteError, match="3 steps in a row"):
        _train("run", _task(range(300, 320), NAN), policy=policy)
    assert _back("run") == []


def test_the_fourth_time_is_the_end() -> None:
    with pytest.raises(NonFiniteError, match="3 steps in a row"):
        _train("run", _task(range(80, 240), NAN), policy="non_finite")
    assert len(_back("run")) == 3
    assert _proven("run") == [(80, 152)]


def test_two_ranks_go_past_it_together() -> None:
    options = ("--train.steps=45", "--train.global_batch=8", "--train.micro_batch=2", "--elastic.roll_back=both")
    more = ("--parallel.compression=int8", "--run_dir=two")
    train_on_threads(*options, *more, size=2, build=lambda rank: _task())
    assert [event["positions"] for event in _back("two")] == [[296, 304]]
    assert _proven("two") == [(296, 304)]


def _state() -> TrainState:
    model = torch.nn.Linear(2, 2)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), scaler, Progress(step=3))


def _after_two_skipped(comm: ThreadComm) -> str:
    """A round begins amid skipped steps; rank 0 was there before, rank 1 is new. What the third brings."""
    state = _state()
    store = CheckpointStore(Path("checkpoints"), pytest.fail) if comm.rank == 0 else None
    commits = Commits(60.0)
    roll_back = RollBack("both", commits, comm, store, lambda event: None, lambda text: None)
    if comm.rank == 0:
        commits.commit(state)
    state.progress = Progress(step=5, position=40, skipped_in_row=2)
    roll_back.begin(state)
    state.progress = Progress(step=6, position=48, skipped_in_row=3)
    spoiled_steps = SpoiledSteps("non_finite", 4, [24, 48], NonFiniteError("three"))
    try:
        gone = roll_back.roll_back(spoiled_steps, state, lambda: None)
    except NonFiniteError:
        return "the end"
    return f"went on: {gone}"


def test_a_rank_that_joins_during_skipped_steps_agrees_with_the_others() -> None:
    assert len(set(on_ranks(2, _after_two_skipped))) == 1


def test_a_rank_lost_during_a_roll_back_leaves_the_skipped_positions_in_the_journal() -> None:
    state, commits = _state(), Commits(60.0)
    events: list[dict[str, Any]] = []
    roll_back = RollBack("both", commits, SoloComm(), None, events.append, lambda text: None)
    commits.commit(state)
    state.progress = Progress(step=5, position=40)

    def lost() -> None:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        roll_back.roll_back(SpoiledSteps("spikes", 5, [32, 40]), state, lost)
    assert state.progress.left_out == [event["positions"] for event in events] == [[32, 40]]


RANGES = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)).map(lambda r: [r[0], r[0] + r[1]]), max_size=6)


@given(RANGES, st.integers(0, 60), st.integers(1, 20))
def test_the_position_of_a_step_accounts_for_skipped_samples(
    ranges: list[list[int]], position: int, count: int
) -> None:
    """Merged ranges hold the same positions."""
    left_out = merge_ranges(ranges)
    assert [p for b, e in left_out for p in range(b, e)] == sorted({p for b, e in ranges for p in range(b, e)})
    assert all(a[1] < b[0] for a, b in pairwise(left_out))
    parts = positions_without(position, count, left_out)
    progress = Progress(position=parts[-1][1], left_out=left_out)
    assert first_position(progress, count) == parts[0][0]
