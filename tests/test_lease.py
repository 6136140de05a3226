"""A lease has one live holder, and no dead one."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch

from hvdtrain import lease
from hvdtrain.errors import RunDirectoryError
from hvdtrain.files import read_object
from hvdtrain.lease import Lease, take_lease
from hvdtrain.state.checkpoint_store import CheckpointStore
from hvdtrain.task.base import Task
from hvdtrain.training.start import run_directory
from tests.support.thread_job import train_on_threads


def _take(path: Path) -> Lease | None:
    return take_lease(path, lambda seconds: pytest.fail("of a holder on this host no beat is waited for"))


def _held(path: Path) -> Lease:
    taken = _take(path)
    assert taken is not None
    return taken


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    first = _held(tmp_path / "l")
    assert _take(tmp_path / "l") is None
    first.release()
    _held(tmp_path / "l").release()
    assert list(tmp_path.iterdir()) == []


def _take_and_die(path: Path) -> None:
    _held(path)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_holder_that_was_killed_is_no_obstacle(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_take_and_die, args=(tmp_path / "l",))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL and (tmp_path / "l").exists()
    _held(tmp_path / "l").release()


def test_a_reused_process_number_is_no_holder(tmp_path: Path) -> None:
    held = _held(tmp_path / "l")
    content = json.loads((tmp_path / "l").read_text())
    held.release()
    (tmp_path / "l").write_text(json.dumps({**content, "began": "1"}))
    _held(tmp_path / "l").release()


FAR = {"nonce": "a", "boot": "of another host", "container": "", "pid": 1, "began": "1"}


@pytest.mark.parametrize("where", ["here", "far"])
def test_of_two_jobs_that_find_a_stale_lease_the_slower_does_not_take_it(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "l"
    path.write_text(json.dumps(FAR if where == "far" else {**FAR, **lease._where()}))
    faster: list[Lease | None] = []

    def look(*_: object) -> bool:
        if not faster:
            faster.append(None)  # the other one looks too, and sees the same
            faster[0] = take_lease(path, lambda seconds: None)
        return False

    if where == "here":  # elsewhere the slower one sees it while it waits for a beat
        monkeypatch.setattr(lease, "holder_lives", look)
    assert take_lease(path, look) is None
    assert faster[0] is not None and read_object(path)["pid"] == os.getpid()
    faster[0].release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("lives", [True, False])
def test_a_holder_elsewhere_is_known_by_its_beats(tmp_path: Path, lives: bool) -> None:
    path, waits = tmp_path / "l", []
    path.write_text(json.dumps(FAR))

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if lives and len(waits) == 3:
            path.write_text(json.dumps({**FAR, "beats": 1}))

    taken = take_lease(path, wait)
    assert (taken is None) == lives
    assert 2 * lease.BEAT_S < sum(waits) <= 20
    if taken is not None:
        taken.release()


def test_a_holder_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "BEAT_S", 0.001)
    held = _held(tmp_path / "l")
    while "beats" not in json.loads((tmp_path / "l").read_text()):
        pass
    held.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("without_locks")
def test_a_run_directory_is_claimed_once_without_locks(tmp_path: Path) -> None:
    for _ in range(2):
        claim = run_directory._claim(tmp_path / "run")
        assert claim is not None
        assert run_directory._claim(tmp_path / "run") is None
        claim.release()


def test_a_job_that_lost_its_lease_does_not_take_it_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "BEAT_S", 0.001)
    held = _held(tmp_path / "l")
    for _ in range(1000):  # a beat that is under way may still be written over it
        _take_over(tmp_path / "l")
        held._thread.join(0.01)
        if not held._thread.is_alive():
            break
    assert held.lost and not held._thread.is_alive()
    held.release()
    assert json.loads((tmp_path / "l").read_text()) == FAR


def _take_over(path: Path) -> None:
    """Do what another host's job does that has seen no beat of this one's."""
    path.with_name("new").write_text(json.dumps(FAR))
    path.with_name("new").replace(path)


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.mark.usefixtures("without_locks")
@pytest.mark.parametrize("size", [1, 2])
def test_a_job_treated_as_dead_ends_on_every_rank(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example after a suspension: two jobs must not write into one run."""
    monkeypatch.setattr(lease, "BEAT_S", 0.001)
    run, drawn = tmp_path / "run", list[int]()

    class Data(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 10_000

        def __getitem__(self, index: int) -> torch.Tensor:
            drawn.append(index)
            if len(drawn) >= 5:  # again and again: a beat of the holder may replace the file just after
                _take_over(run / ".lease")
            return torch.ones(1)

    def build(rank: int) -> Task:
        return Task(torch.nn.Linear(1, 1), lambda model, batch: (model(batch).sum(), len(batch)), Data())

    steps = 2000
    options = (f"--train.steps={steps}", "--train.global_batch=2", "--train.micro_batch=1", "--checkpoint.every=0")
    with pytest.raises(RunDirectoryError, match="another job has taken over"):
        train_on_threads(*options, f"--run_dir={run}", "--loader.workers=0", size=size, build=build)
    assert len(drawn) < 2 * steps
    assert not list(run.glob("checkpoints/step-*"))
    assert json.loads((run / ".lease").read_text()) == FAR
    assert "failed" not in (run / "journal.jsonl").read_text()


@pytest.mark.usefixtures("without_locks")
def test_nothing_is_saved_into_a_run_that_another_job_has_taken_over(tmp_path: Path) -> None:
    """Although no heartbeat was due since, which would have detected it."""
    claim = run_directory._claim(tmp_path)
    assert claim is not None
    store = CheckpointStore(tmp_path / "checkpoints", pytest.fail, check=claim.check)
    store.begin(1, 1)
    _take_over(tmp_path / ".lease")
    with pytest.raises(RunDirectoryError):
        store.begin(2, 1)
    assert claim.lost
    claim.release()
