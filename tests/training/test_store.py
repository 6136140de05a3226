"""Copies of a run on a store: complete or not there, never in the way of a step, and enough to continue the run."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import hvdtrain
from hvdtrain.config.parse import parse_argv
from hvdtrain.errors import ConfigError, RunDirectoryError, StoreError, UnreachableStoreError
from hvdtrain.lease import Lease
from hvdtrain.object_store import StoreFolder
from hvdtrain.state import store_copier
from hvdtrain.state.checkpoint_store import Measure
from hvdtrain.state.stored_run import StoredRun
from hvdtrain.training.start import store_target
from hvdtrain.training.start.store_target import take_store_lease
from tests.support.gallery import TOY
from tests.support.journals import read_events, read_losses
from tests.support.launch import training
from tests.support.object_store import BUCKET, S3Server, s3_server
from tests.support.thread_job import train_on_threads

fsspec = pytest.importorskip("fsspec", reason="the fsspec library is not installed")

S3 = pytest.param("s3", marks=pytest.mark.slow)
NO_LEASE = "--checkpoint.lease=false"  # of a job that is not released, as its process lives on


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    pytest.importorskip("s3fs", reason="the s3fs library is not installed")
    with s3_server(tmp_path_factory.mktemp("s3")) as found:
        yield found


@pytest.fixture(params=["file", S3])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"file://{tmp_path}/store"
    request.getfixturevalue("server")
    return f"s3://{BUCKET}/{tmp_path.name}"


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Of a run without a store, that nothing interrupts."""
    run = tmp_path_factory.mktemp("whole") / "run"
    _train(run)
    return read_losses(run)


def _train(run: Path, *options: str, size: int = 1, callbacks: tuple[hvdtrain.Callback, ...] = ()) -> None:
    train_on_threads(*TOY[:-1], f"--run_dir={run}", *options, size=size, callbacks=callbacks)


def _stored(url: str) -> StoredRun:
    return StoredRun(StoreFolder(url, "--checkpoint.to"), Measure())


def _steps(url: str) -> list[int]:
    return [saved.step for saved in _stored(url).list()]


class _At(hvdtrain.Callback):
    """Calls functions after steps."""

    def __init__(self, **calls: Callable[[], object]) -> None:
        self._calls = {int(name.removeprefix("step")): call for name, call in calls.items()}

    def __deepcopy__(self, memo: object) -> _At:
        return self

    def on_step(self, training: hvdtrain.Training, record: dict[str, Any]) -> None:
        if call := self._calls.get(record["step"]):
            call()


HOLD = """
import time, hvdtrain

class Hold(hvdtrain.Callback):
    def on_step(self, training, record):
        if record["step"] == 45:
            time.sleep(600)
"""


def test_a_run_continues_from_its_store_alone_on_more_ranks(
    url: str, losses: list[float], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    run, to = tmp_path / "run", f"--checkpoint.to={url}"
    if url.startswith("s3"):
        (tmp_path / "hold.py").write_text(HOLD)
        how = {"size": 1, "cwd": tmp_path, "environment": request.getfixturevalue("server").environment()}
        with training(*TOY[:-1], f"--run_dir={run}", to, "--callbacks=hold.py:Hold", **how) as process:
            while not _steps(url):
                time.sleep(0.05)
            process.kill()
    else:
        _train(run, to, "--train.stop_at=40", size=2)
    shutil.rmtree(run)
    _train(run, to, "--checkpoint.keep=1", NO_LEASE, size=3)
    assert read_losses(run) == pytest.approx(losses, rel=1e-5)
    best = min(read_events(run, "evaluation")[1:], key=lambda event: event["loss"])["at_step"]
    assert _steps(url) == sorted({best, 60})
    other = tmp_path / "other"
    _train(other, to, "--checkpoint.keep=1", NO_LEASE)  # of a run that has ended: nothing is trained, and all is there
    assert sorted(path.name for path in other.glob("checkpoints/step-*")) == [f"step-{s:06d}" for s in _steps(url)]
    assert (other / "ledger").is_dir()


@pytest.mark.parametrize("is_copied", [True, False])
def test_a_damaged_checkpoint_is_replaced_by_its_copy(is_copied: bool, losses: list[float], tmp_path: Path) -> None:
    run, url = tmp_path / "run", f"file://{tmp_path}/store"
    _train(run, f"--checkpoint.to={url}", "--train.stop_at=40")
    (damaged,) = run.glob("checkpoints/step-000040/model*.safetensors")
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    if not is_copied:
        shutil.rmtree(tmp_path / "store/checkpoints/step-000040")
    _train(run, f"--checkpoint.to={url}", NO_LEASE)
    assert read_losses(run) == losses
    assert read_events(run, "resumed")[0]["step"] == (40 if is_copied else 20)


@pytest.mark.parametrize("fault", ["fails", pytest.param("is killed", marks=pytest.mark.slow)])
def test_a_lost_store_costs_no_step(
    fault: str,
    losses: list[float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    run, url, returned = tmp_path / "run", f"file://{tmp_path}/store", threading.Event()
    if fault == "fails":
        upload = StoreFolder.upload
        monkeypatch.setattr(store_copier, "_RETRY_S", (0.001, 0.001))

        def fail(self: StoreFolder, path: Path, name: str) -> None:
            if not returned.is_set() and name.startswith(("checkpoints/step-000040", "checkpoints/step-000060")):
                raise UnreachableStoreError("the store is lost")
            upload(self, path, name)

        monkeypatch.setattr(StoreFolder, "upload", fail)
        lose, back = (lambda: None), returned.set
    else:
        server, url = request.getfixturevalue("server"), f"s3://{BUCKET}/lost"
        lose, back = server.kill, server.start

    def wait_for_copy() -> None:
        while 20 not in _steps(url):
            time.sleep(0.01)

    def go_on() -> None:
        while not read_events(run, "copy_failed"):
            time.sleep(0.01)
        back()

    thread = threading.Thread(target=go_on)
    at = {"step30": lose, "step50": thread.start}
    _train(run, f"--checkpoint.to={url}", callbacks=(_At(step25=wait_for_copy, **at),))
    thread.join()
    # The library of S3 waits for random times by Python's global `random`, from which this task draws, too.
    assert read_losses(run) == pytest.approx(losses, rel=1e-5 if fault == "fails" else 1e-3)
    assert read_events(run, "copied")[-1]["at_step"] == 60
    assert 60 in _steps(url)
    out = capsys.readouterr().out
    assert "steps behind, at step 20" in out and "up to date again" in out


def test_a_truncated_object_is_not_resumed_from(url: str, losses: list[float], tmp_path: Path) -> None:
    run, to = tmp_path / "run", f"--checkpoint.to={url}"
    _train(run, to, "--train.stop_at=40")
    shutil.rmtree(run)
    folder, name = StoreFolder(url, "option"), "checkpoints/step-000040/model.safetensors"
    folder.write(name, folder.read(name)[:-1])
    _train(run, to, NO_LEASE)
    assert read_losses(run) == pytest.approx(losses, rel=1e-5)
    assert [event["step"] for event in read_events(run, "resumed")] == [20]


def test_an_older_checkpoint_that_is_resumed_counts_as_the_newest(losses: list[float], tmp_path: Path) -> None:
    run, url = tmp_path / "run", f"file://{tmp_path}/store"
    to = f"--checkpoint.to={url}"
    _train(run, to, "--train.stop_at=40")
    _train(run, to, NO_LEASE, f"--resume={run}/checkpoints/step-000020", "--train.stop_at=30")
    assert _steps(url) == [20, 30]


@pytest.mark.parametrize(
    ("user", "place", "error", "text"),
    [
        pytest.param("reader", BUCKET, StoreError, "Access Denied", marks=pytest.mark.slow),
        pytest.param("writer", "no-bucket", StoreError, "bucket does not exist", marks=pytest.mark.slow),
        ("", "gs://bucket/run", ConfigError, "gcsfs"),
    ],
)
def test_a_store_that_cannot_be_used_is_refused_before_training(
    user: str,
    place: str,
    error: type[Exception],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if user:
        for name, value in request.getfixturevalue("server").environment(user).items():
            monkeypatch.setenv(name, value)
        fsspec.get_filesystem_class("s3").clear_instance_cache()
    with pytest.raises(error, match=text):
        _train(tmp_path / "run", f"--checkpoint.to={place if '/' in place else f's3://{place}/denied'}")
    assert not list(tmp_path.glob("run/*.jsonl"))
    if user:
        fsspec.get_filesystem_class("s3").clear_instance_cache()


@pytest.mark.parametrize(
    "option", ["--checkpoint.to=s3://user:word@bucket", "--checkpoint.to=folder", "--run_dir=s3://bucket/run"]
)
def test_what_is_no_folder_of_a_store_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=r"s3://bucket/run|--checkpoint\.to"):
        parse_argv([option], None)


def test_a_run_on_the_store_is_not_mixed_with_another(tmp_path: Path) -> None:
    to = f"--checkpoint.to=file://{tmp_path}/store"
    _train(tmp_path / "run", to, "--train.stop_at=20")
    with pytest.raises(RunDirectoryError, match="already has a run"):
        _train(tmp_path / "other", to, "--resume=never")
    with pytest.raises(RunDirectoryError, match="has the checkpoints of another run") as caught:
        _train(tmp_path / "other", to, NO_LEASE, "--optimizer.lr=0.5")
    assert str(caught.value.found).startswith("optimizer.lr: ") and "--run_dir run" in str(caught.value.next_step)
    shutil.rmtree(tmp_path / "run")
    _train(tmp_path / "run", to, NO_LEASE, "--optimizer.lr=0.5", "--train.stop_at=40")  # it is continued otherwise
    assert [event["step"] for event in read_events(tmp_path / "run", "resumed")] == [20]


def test_the_run_folder_is_no_store_of_itself(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is the run folder itself"):
        _train(tmp_path / "run", f"--checkpoint.to=file://{tmp_path}/run")


FAR = {"nonce": "a", "boot": "of another host", "container": "", "pid": 1, "began": "1"}


@pytest.mark.parametrize("held", ["by nobody", "by a dead job"])
def test_one_of_eight_jobs_gets_the_lease(held: str, url: str) -> None:
    folder = StoreFolder(f"{url}/lease", "option")
    if held == "by a dead job":
        folder.write(".lease/00000007.json", json.dumps(FAR).encode())
    barrier, taken = threading.Barrier(8), list[Lease]()

    def claim() -> None:
        barrier.wait()
        with suppress(RunDirectoryError):
            taken.append(take_store_lease(folder, "", lambda seconds: time.sleep(0.05)))

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 1
    with pytest.raises(RunDirectoryError, match="another job copies"):
        take_store_lease(folder, "")
    taken[0].release()
    take_store_lease(folder, "").release()


def test_a_job_may_take_its_own_lease(tmp_path: Path) -> None:
    folder = StoreFolder(f"file://{tmp_path}", "option")
    first = take_store_lease(folder, "job")
    second = take_store_lease(folder, "job")
    assert first.check() and not second.check()
    first.release()
    assert not second.check()
    second.release()


def test_a_store_without_conditional_writes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def create(self: StoreFolder, name: str, content: bytes) -> bool:
        self.write(name, content)
        return True

    monkeypatch.setattr(StoreFolder, "create", create)
    to = f"--checkpoint.to=file://{tmp_path}/store"
    with pytest.raises(StoreError, match="conditional writes"):
        _train(tmp_path / "run", to)
    _train(tmp_path / "run", to, NO_LEASE, "--train.stop_at=20")


def test_a_job_whose_store_another_one_took_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_target, "BEAT_S", 0.001)
    folder = StoreFolder(f"file://{tmp_path}/store", "option")

    def take_over() -> None:
        folder.write(".lease/00000009.json", json.dumps(FAR).encode())
        time.sleep(0.5)  # a few beats

    with pytest.raises(RunDirectoryError, match="another job has taken over"):
        _train(tmp_path / "run", f"--checkpoint.to={folder.url}", size=2, callbacks=(_At(step30=take_over),))
