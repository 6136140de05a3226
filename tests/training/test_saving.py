"""When held-out samples are looked at and checkpoints saved, in whole runs: a full disk ends none."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import hvdtrain
from hvdtrain.errors import CheckpointError
from hvdtrain.spans import Spans
from hvdtrain.state import background_writer, checkpoint_store, shard_files
from hvdtrain.state.background_writer import CheckpointWriter
from hvdtrain.state.checkpoint_store import MANIFEST, CheckpointStore
from hvdtrain.training.loop import saving
from hvdtrain.training.loop.saving import Saving
from tests.support.journals import read_events, read_journal, read_losses
from tests.support.thread_comm import ThreadComm, on_ranks
from tests.support.thread_job import train_on_threads
from tests.support.toy import toy

pytestmark = pytest.mark.usefixtures("own_folder")
TOY = f"{Path(__file__).parents[1]}/support/toy.py:toy"
TRAIN = {"steps": 12, "global_batch": 4, "micro_batch": 2, "eval_every": 100}


def _fail(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """The disk is full for so many saves."""
    real, left = shard_files.write_shard, [times]

    def write(*arguments: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    for module in (shard_files, checkpoint_store):
        monkeypatch.setattr(module, "write_shard", write)


def _events(run: Path) -> list[tuple[str, int]]:
    lines = read_journal(run / "journal.jsonl")
    return [(line["event"], line["at_step"]) for line in lines if "checkpoint" in line.get("event", "")]


def _warnings(run: Path) -> list[str]:
    return [event["text"] for event in read_events(run, "warning")]


def test_a_full_disk_ends_no_training_and_changes_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"train": TRAIN, "checkpoint": {"every": 4}}
    hvdtrain.train({**options, "run_dir": str(tmp_path / "whole")}, toy)
    _fail(monkeypatch, 1)
    monkeypatch.setattr(background_writer, "_FIRST_RETRY_S", 1e9)
    result = hvdtrain.train({**options, "run_dir": str(tmp_path / "full")}, toy)
    assert result.reason == "finished"
    assert _events(tmp_path / "full") == [("checkpoint_failed", 4), ("checkpoint", 8), ("checkpoint", 12)]
    assert read_losses(tmp_path / "full") == read_losses(tmp_path / "whole")


def test_a_failed_save_is_tried_again_before_the_next_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fail(monkeypatch, 1)
    monkeypatch.setattr(background_writer, "_FIRST_RETRY_S", 0.0)
    poll = CheckpointWriter.poll
    monkeypatch.setattr(CheckpointWriter, "poll", lambda one: (one._join(), poll(one))[1])  # as if each save were quick
    hvdtrain.train({"train": TRAIN, "checkpoint": {"every": 6}, "run_dir": str(tmp_path)}, toy)
    failed, again, *rest = _events(tmp_path)
    assert failed == ("checkpoint_failed", 6)
    assert again[0] == "checkpoint" and 6 < again[1] < 12
    assert rest == [("checkpoint", 12)]


@pytest.mark.parametrize(
    ("number", "failures"), [(None, 3), (signal.SIGINT, 2), (signal.SIGTERM, 2), (signal.SIGTERM, 99)]
)
def test_a_last_save_waits_for_somebody_to_make_room_until_a_signal_ends_that(
    number: signal.Signals | None, failures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the signal with one more try."""
    _fail(monkeypatch, failures)
    slept: list[float] = []
    really = time.sleep

    def sleep(seconds: float) -> None:
        if threading.current_thread() is not threading.main_thread():  # of another test
            return really(seconds)
        slept.append(seconds)
        if number is not None and sum(slept) == 3.0:  # the second wait is 8 s
            os.kill(os.getpid(), number)

    monkeypatch.setattr(saving, "WAITS_S", (1.0, 8.0, 60.0))
    monkeypatch.setattr(saving.time, "sleep", sleep)
    options = {"train": TRAIN, "checkpoint": {"every": 0}, "run_dir": str(tmp_path)}
    if failures < 99:
        assert hvdtrain.train(options, toy).reason == "finished"
        assert _events(tmp_path) == [("checkpoint", 12)]
    else:
        with pytest.raises(CheckpointError, match=r"step 12 .*No space left on device"):
            hvdtrain.train(options, toy)
        assert list((tmp_path / "checkpoints").iterdir()) == []
    assert sum(slept) == (3.0 if number else 69.0)
    told = _warnings(tmp_path)
    waits = ["next try in 1 s", "next try in 8 s", "next try in 60 s"]
    assert all(wait in text for wait, text in zip(waits, told[: 2 if number else 3], strict=False))
    assert [number is not None and number.name in text for text in told[2:3]] == [number is not None]
    assert ["ends without it" in text for text in told[3:]] == [True] * (failures == 99)


@pytest.mark.parametrize("signalled", [0, 1])
def test_a_signal_to_any_rank_ends_the_waiting_of_all(signalled: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving.time, "sleep", lambda seconds: None)

    def body(comm: ThreadComm) -> tuple[bool, int]:
        looks = [0]

        def requests() -> list[int]:
            looks[0] += 1
            return [0, int(comm.rank == signalled and looks[0] == 5), 0, 0]

        one = SimpleNamespace(_comm=comm, _store=None, stepper=SimpleNamespace(spans=Spans()))
        return Saving._is_stopped(cast(Saving, one), CheckpointError("no room"), 60.0, requests), looks[0]

    assert on_ranks(2, body) == [(True, 5)] * 2


@pytest.mark.parametrize(
    ("step", "seen", "saved", "expected"),
    [
        (10, 5, 0, ["evaluate"]),  # rank 0 was there when the others were lost
        (10, 10, 0, []),
        (10, -1, 0, []),  # nobody was
        (11, 5, 0, []),
        (20, 15, 0, ["evaluate", "save"]),
        (20, 20, 0, ["evaluate", "save"]),
        (20, 20, 20, []),
        (33, 30, 0, ["evaluate", "save and wait"]),
    ],
)
def test_a_save_that_lost_ranks_prevented_is_made_up_once(
    step: int, seen: int, saved: int, expected: list[str]
) -> None:
    def body(comm: ThreadComm) -> list[str]:
        done: list[str] = []
        one = cast(Any, Saving.__new__(Saving))
        one._comm, one._worker = comm, SimpleNamespace(evaluated=-1 if comm.rank else seen)
        one._state = SimpleNamespace(progress=SimpleNamespace(step=step))
        one._config = SimpleNamespace(train=SimpleNamespace(eval_every=5), checkpoint=SimpleNamespace(every=20))
        one._store = SimpleNamespace(list=lambda: [SimpleNamespace(step=saved)])
        one.current = SimpleNamespace(stop=33)
        one.stepper = SimpleNamespace(engine=SimpleNamespace(covered=lambda s: [s]))
        one.evaluate = lambda: done.append("evaluate")
        one.save = lambda evaluated, wait, requests: done.append("save and wait" if wait else "save")
        one.catch_up(lambda: [0])
        assert one._worker.evaluated == step
        return done

    assert on_ranks(2, body) == [expected] * 2


def test_a_save_that_a_signal_asks_for_is_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def schedule(step: int) -> float:
        if step == 3:
            os.kill(os.getpid(), signal.SIGUSR1)
        return 0.1

    options = {"train": TRAIN, "checkpoint": {"every": 0}, "run_dir": str(tmp_path)}
    hvdtrain.train(options, replace(toy(), schedule=schedule))
    said = capfd.readouterr().out
    assert said.count("saved, requested by SIGUSR1: checkpoints/step-0") == 1
    assert [step for _, step in _events(tmp_path)][1:] == [12]


@pytest.mark.parametrize(("damaged", "is_told"), [(2, True), (1, False)])
def test_a_restart_for_lack_of_a_complete_checkpoint_is_reported(damaged: int, is_told: bool, tmp_path: Path) -> None:
    options = {"train": TRAIN, "checkpoint": {"every": 6}, "run_dir": str(tmp_path)}
    hvdtrain.train(options, toy)
    saves = CheckpointStore(tmp_path / "checkpoints", pytest.fail).list()
    for saved in saves[len(saves) - damaged :]:
        (saved.path / "manifest.json").write_text("{}")
    hvdtrain.train({**options, "train": {**TRAIN, "steps": 14}}, toy)
    told = [text for text in _warnings(tmp_path) if "training starts again at step 1" in text]
    assert len(told) == is_told
    assert all("2 checkpoint(s)" in text and str(tmp_path / "checkpoints") in text for text in told)


def _evaluations(run: str, every: int, **options: Any) -> dict[int, float]:
    train = {"steps": 10, "global_batch": 4, "micro_batch": 2, **options}
    hvdtrain.train({"train": train, "checkpoint": {"every": every, "keep": 9}, "run_dir": run}, toy)
    events = read_events(run, "evaluation")
    found = {event["at_step"]: event["loss"] for event in events}
    assert len(found) == len(events), "no step is evaluated twice"
    return found


def _heldout_losses(run: str) -> dict[int, float | None]:
    manifests = [json.loads((path / MANIFEST).read_text()) for path in Path(run, "checkpoints").glob("step-*")]
    return {manifest["step"]: manifest["heldout_loss"] for manifest in manifests}


@pytest.mark.parametrize(
    ("eval_every", "every", "steps"),
    [(None, 4, [0, 4, 8, 10]), (None, 0, [0, 10]), (3, 4, [0, 3, 6, 9, 10]), (99, 4, [0, 10])],
)
def test_steps_and_checkpoints(eval_every: int | None, every: int, steps: list[int]) -> None:
    found = _evaluations("run", every, eval_every=eval_every)
    assert sorted(found) == steps
    saved = _heldout_losses("run")
    better = [
        step for step in steps[1:-1] if eval_every and found[step] == min(found[s] for s in steps[1:] if s <= step)
    ]
    assert sorted(saved) == sorted({*better, *([4, 8, 10] if every else [10])})
    assert saved == {step: found.get(step) for step in saved}


class Judge(hvdtrain.Callback):
    """Gives evaluations a value by which other ranks would choose others than rank 0."""

    def on_evaluation(self, training: Any, evaluation: Any) -> None:
        given = {0: 9.0, 2: 3.0, 4: 5.0, 6: 4.0, 8: 5.0}.get(training.step, 1.0)
        evaluation.metrics["given"] = -given if training.rank else given


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_best_evaluation_is_saved_when_it_is_found_also_after_a_resume(size: int) -> None:
    options = ["--train.eval_every=2", "--checkpoint.every=0", "--checkpoint.keep=1", "--checkpoint.best=given:max"]
    options += ["--train.steps=10", "--train.global_batch=6", "--train.micro_batch=1", "--run_dir=run", f"--task={TOY}"]
    saved = Path("run/checkpoints")
    for stop, kept in ((3, [2, 3]), (7, [4, 7]), (10, [4, 10])):
        results = train_on_threads(*options, f"--train.stop_at={stop}", size=size, callbacks=[Judge()])
        assert sorted(int(path.name[5:]) for path in saved.glob("step-*")) == kept
        assert (saved / "best").readlink() == Path(f"step-{kept[0]:06d}")
    assert results[0].best == "given 5.0000 at step 4: checkpoints/step-000004"


def test_a_resumed_run_evaluates_at_the_same_steps() -> None:
    """And looking more often changes no training."""
    whole = _evaluations("whole", 0, eval_every=4)
    _evaluations("parts", 0, eval_every=4, stop_at=5)
    parts = _evaluations("parts", 0, eval_every=4)
    assert sorted(parts) == [0, 4, 5, 8, 10]
    assert whole == {step: parts[step] for step in whole}
    _evaluations("often", 0, eval_every=1)
    assert read_losses("often") == read_losses("parts") == read_losses("whole")


def test_an_invalid_interval() -> None:
    with pytest.raises(hvdtrain.HvdtrainError, match=r"--train.eval_every is "):
        _evaluations("run", 0, eval_every=0)


@pytest.mark.parametrize("steps", [10, 5])
def test_a_stop_by_signal_is_not_kept_waiting(steps: int) -> None:
    """mpirun kills one second after SIGTERM: the checkpoint comes first, also of the last step."""

    def schedule(step: int) -> float:
        if step == 3:
            signal.raise_signal(signal.SIGTERM)
        return 1.0

    train = {"steps": steps, "global_batch": 4, "micro_batch": 2, "eval_every": 1}
    options = {"train": train, "checkpoint": {"every": 1}, "run_dir": "run"}
    result = hvdtrain.train(options, replace(toy(), schedule=schedule))
    assert result.reason == "SIGTERM"
    assert [event["at_step"] for event in read_events("run", "evaluation")] == list(range(result.step))
    assert _heldout_losses("run")[result.step] is None
