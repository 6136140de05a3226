"""Saving in the background: the written state is that of its step; a failure is reported and tried again."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hvdtrain.comm.solo import SoloComm
from hvdtrain.errors import CheckpointError
from hvdtrain.state import background_writer, shard_files
from hvdtrain.state.background_writer import CheckpointWriter
from hvdtrain.state.checkpoint_store import CheckpointStore, load
from hvdtrain.state.pieces import StateDict
from hvdtrain.state.shard_files import ShardedWrite, request_shards
from tests.support.checkpoints import same_state
from tests.support.launch import TIMEOUT_S
from tests.support.thread_comm import ThreadComm, on_ranks


class Told:
    """What a writer has told, and a clock that stands still."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.warnings: list[str] = []
        self.now_s = 0.0

    def names(self) -> list[str]:
        return [event["event"] for event in self.events]


def _state(step: int, width: int = 1000) -> StateDict:
    model = {f"w{n}": torch.full((width + n,), float(step)) for n in range(5)} | {"alone": torch.tensor(step)}
    return StateDict({"model": model, "optimizer": {}}, {"step": step})


def _writer(comm: Any, folder: Path, told: Told, min_bytes: int = 1000) -> CheckpointWriter:
    store = CheckpointStore(folder / "checkpoints", told.warnings.append) if comm.rank == 0 else None
    return CheckpointWriter(
        comm, store, 3, told.events.append, told.warnings.append, min_bytes=min_bytes, clock=lambda: told.now_s
    )


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Writing tensors waits for this event."""
    gate = threading.Event()
    real = shard_files.write_shard

    def write(*arguments: Any) -> Any:
        assert gate.wait(TIMEOUT_S)
        return real(*arguments)

    monkeypatch.setattr(shard_files, "write_shard", write)
    return gate


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_state_of_the_step_is_written_whatever_changes_meanwhile(
    size: int, tmp_path: Path, slow_disk: threading.Event
) -> None:
    def body(comm: ThreadComm) -> Told:
        told, state = Told(), _state(1)
        writer = _writer(comm, tmp_path, told)
        with writer.opened():
            writer.save(1, state, {"heldout_loss": 1.0}, wait=False)
            for tensor in state.tensors["model"].values():
                tensor.fill_(-1)
            assert writer.poll() == 0
            assert told.events == [], "nothing is told before it is on the disk"
            comm.barrier()
            slow_disk.set()
        return told

    told = on_ranks(size, body, at_once=True)
    (event,) = told[0].events
    assert event == {"event": "checkpoint", "at_step": 1, "path": "step-000001"}
    folder = tmp_path / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["step-000001"]
    assert len(list((folder / "step-000001").glob("model*.safetensors"))) == size
    assert {path.suffix for path in (folder / "step-000001").iterdir()} == {".json", ".safetensors"}
    assert same_state(load(folder / "step-000001"), _state(1))


def test_a_save_waits_for_the_one_before(tmp_path: Path, slow_disk: threading.Event) -> None:
    """The copy that is being written is not written over."""
    told = Told()
    writer = _writer(SoloComm(), tmp_path, told)
    with writer.opened():
        writer.save(1, _state(1), {}, wait=False)
        second = threading.Thread(target=lambda: writer.save(2, _state(2), {}, wait=False))
        second.start()
        second.join(0.05)
        assert second.is_alive()
        slow_disk.set()
        second.join()
    assert [event["at_step"] for event in told.events] == [1, 2]
    for step in (1, 2):
        assert same_state(load(tmp_path / f"checkpoints/step-{step:06d}"), _state(step))


def test_waiting_saves_say_so_when_they_return(tmp_path: Path) -> None:
    def body(comm: ThreadComm) -> list[str]:
        told = Told()
        writer = _writer(comm, tmp_path, told)
        with writer.opened():
            writer.save(1, _state(1), {}, wait=True)
            assert (tmp_path / "checkpoints/step-000001").is_dir(), "on every rank"
            writer.save(2, _state(2), {}, wait=True, urgent=True)
        return told.names()

    assert on_ranks(2, body, at_once=True)[0] == ["checkpoint", "checkpoint"]


def _full(monkeypatch: pytest.MonkeyPatch, number: int, rank: int) -> Callable[[], None]:
    """From now on writing tensors fails on `rank`; what mends it."""
    real = shard_files.write_shard
    broken = [True]

    def write(folder: Path, writer: int, *rest: Any) -> Any:
        if broken[0] and writer == rank:
            (folder / "model-half.safetensors").write_bytes(b"half")
            raise OSError(number, os.strerror(number))
        return real(folder, writer, *rest)

    monkeypatch.setattr(shard_files, "write_shard", write)
    return lambda: broken.__setitem__(0, False)


@pytest.mark.parametrize(("number", "rank"), [(errno.ENOSPC, 0), (errno.EDQUOT, 1), (errno.EROFS, 0), (errno.EIO, 1)])
def test_a_failed_save_is_reported_and_tried_again_at_growing_intervals(
    number: int, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mend = _full(monkeypatch, number, rank)

    def body(comm: ThreadComm) -> Told:
        told = Told()
        writer = _writer(comm, tmp_path, told)
        with writer.opened():
            waits = []
            for step in range(1, 4):
                writer.save(step, _state(step), {}, wait=False)
                writer._join()
                before_s = told.now_s
                assert writer.poll() == 0, "not at once"
                while comm.rank == 0 and not writer.poll():
                    told.now_s += 1
                    assert told.now_s - before_s < 100
                waits.append(told.now_s - before_s)
            assert comm.rank != 0 or waits == [10, 20, 40]
            comm.barrier()
            mend()
            writer.save(4, _state(4), {}, wait=False)
            writer._join()
            assert writer.poll() == 0
        return told

    told = on_ranks(2, body, at_once=True)[0]
    assert told.names() == ["checkpoint_failed"] * 3 + ["checkpoint"]
    assert all(os.strerror(number) in event["error"] for event in told.events[:3])
    assert len(told.warnings) == 3
    assert all("no checkpoint yet" in text for text in told.warnings)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000004"]


def test_due_saves_are_tried_and_reported_only_for_a_new_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mend = _full(monkeypatch, errno.ENOSPC, 0)
    told = Told()
    writer = _writer(SoloComm(), tmp_path, told)
    asked_at: list[float] = []

    def save(step: int) -> None:
        writer.save(step, _state(step), {}, wait=False)
        writer.wait()

    with writer.opened():
        for step in range(1, 60):  # one every 2 s
            save(step)
            told.now_s += 2
            if writer.poll():
                asked_at.append(told.now_s)
        assert asked_at == [10, 30, 70]
        failed = [event for event in told.events if event["event"] == "checkpoint_failed"]
        assert len(failed) == 59, "each was tried"
        assert [float(text.partition("in at most ")[2].split()[0]) for text in told.warnings] == [10, 20, 40, 80]
        assert [event["retry_s"] for event in failed[:7]] == [10, 8, 6, 4, 2, 20, 18]
        mend()
        mend_again = _full(monkeypatch, errno.EROFS, 0)
        save(60)
        assert os.strerror(errno.EROFS) in told.warnings[-1] and len(told.warnings) == 5
        mend_again()
        save(61)
        told.now_s += 1e6
        assert not writer.poll(), "a later save was the retry"
        save(62)
    assert [event.get("why") for event in told.events[-2:]] == ["after saves that failed", None]


@pytest.mark.parametrize("fault", ["folder", "rank 0", "rank 1"])
def test_a_last_save_that_fails_is_an_error_on_every_rank(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "folder":
        (tmp_path / "checkpoints").write_text("in the way")
    else:
        _full(monkeypatch, errno.ENOSPC, int(fault[-1]))

    def body(comm: ThreadComm) -> Told:
        told = Told()
        writer = _writer(comm, tmp_path, told)
        with writer.opened():
            writer.save(1, _state(1), {}, wait=False)
            with pytest.raises(CheckpointError, match="step 2 could not be written"):
                writer.save(2, _state(2), {}, wait=True)
        return told

    assert on_ranks(2, body, at_once=True)[0].names() == ["checkpoint_failed"], "what training survives is an event"


@pytest.fixture
def silent_rank_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """At step 2 rank 1 writes its files and is gone before it has said so; patience is short."""
    write_on_other_rank, gather = ShardedWrite.write_on_other_rank, ShardedWrite.gather

    def write_and_go(self: ShardedWrite, number: int, progress: Callable[[], None]) -> None:
        if self.step == 1:
            write_on_other_rank(self, number, progress)
        else:
            shard_files.write_shard(self.folder, number, self.count, self.own_state(), progress)

    monkeypatch.setattr(ShardedWrite, "write_on_other_rank", write_and_go)
    monkeypatch.setattr(
        ShardedWrite,
        "gather",
        lambda self, *what: gather(self, *what, timeout_s=TIMEOUT_S if self.step == 1 else 0.0),
    )


@pytest.mark.usefixtures("silent_rank_1")
def test_a_silent_rank_is_not_waited_for_forever(tmp_path: Path) -> None:
    def body(comm: ThreadComm) -> Told:
        told = Told()
        writer = _writer(comm, tmp_path, told)
        with writer.opened():
            for step in (1, 2):
                writer.save(step, _state(step), {}, wait=False)
        return told

    told = on_ranks(2, body, at_once=True)[0]
    assert told.names() == ["checkpoint", "checkpoint_failed"]
    assert "rank 1 has not written its part" in told.events[1]["error"]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]


def test_an_error_of_the_run_waits_for_no_other_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 dies while it writes; rank 0 hears of that as an error of a collective."""
    monkeypatch.setattr(ShardedWrite, "write_on_other_rank", lambda *arguments: None)

    def body(comm: ThreadComm) -> None:
        writer = _writer(comm, tmp_path, Told())
        with pytest.raises(RuntimeError, match="the other is gone"), writer.opened():
            writer.save(1, _state(1), {}, wait=False)
            raise RuntimeError("the other is gone")

    on_ranks(2, body, at_once=True)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_an_error_of_the_run_leaves_time_for_the_write_of_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_writer, "_PATIENCE_S", TIMEOUT_S)
    told = Told()
    writer = _writer(SoloComm(), tmp_path, told)
    with pytest.raises(RuntimeError), writer.opened():
        writer.save(1, _state(1), {}, wait=False)
        raise RuntimeError
    assert same_state(load(tmp_path / "checkpoints/step-000001"), _state(1))
    assert told.names() == ["checkpoint"]


def test_orphans_are_removed_at_the_start_but_not_files_being_written(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    store = CheckpointStore(folder, pytest.fail)
    living = store.begin(7, 1)
    dead = folder / living.name.replace(f"-{os.getpid()}-", "-4194305-")  # above the highest number of a process
    dead.mkdir()
    (dead / "model.safetensors").write_bytes(b"half")
    far = folder / ".writing-step-000007-0123abcd-1-another-host"
    far.mkdir()
    writer = _writer(SoloComm(), tmp_path, Told())
    with writer.opened():
        assert {path.name for path in folder.iterdir()} == {living.name, far.name}
    (far / "model.safetensors").touch()
    os.utime(far, (1, 1))
    with writer.opened():
        assert far.exists(), "a file in it is new"
        os.utime(far / "model.safetensors", (1, 1))
    with writer.opened():
        assert {path.name for path in folder.iterdir()} == {living.name}


def test_a_state_that_cannot_be_saved_is_refused_on_every_rank(tmp_path: Path) -> None:
    def body(comm: ThreadComm) -> None:
        state = StateDict({"model": {"odd": torch.zeros(1, dtype=torch.complex128)}, "optimizer": {}}, {})
        with pytest.raises(CheckpointError, match="odd cannot be saved"):
            _writer(comm, tmp_path, Told()).save(1, state, {}, wait=False)

    on_ranks(2, body, at_once=True)


def test_ranks_that_see_other_files_leave_all_to_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.exists

    def body(comm: ThreadComm) -> None:
        writer = _writer(comm, tmp_path, Told())
        with writer.opened():
            writer.save(1, _state(1), {}, wait=False)

    monkeypatch.setattr(Path, "exists", lambda path: real(path) and not path.name.startswith(".shared-"))
    on_ranks(2, body, at_once=True)
    assert [path.name for path in (tmp_path / "checkpoints/step-000001").glob("model*s")] == ["model.safetensors"]


def test_a_part_with_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    request_shards(tmp_path, 2)
    mine = StateDict({"model": {"a": torch.ones(2)}}, {})
    write = ShardedWrite(tmp_path, 3, 2, lambda: mine, 2, {}, None)
    write.write_on_other_rank(1, lambda: None)
    with pytest.raises(OSError, match="written 1 tensors instead of 2"):
        write.gather(lambda: None, threading.Event())
