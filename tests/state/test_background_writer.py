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
from hvdtrain.state import background_writer, checkpoint_store, shard_files
from hvdtrain.state.background_writer import CheckpointWriter
from hvdtrain.state.checkpoint_store import CheckpointStore, load
from hvdtrain.state.pieces import StateDict
from hvdtrain.state.shard_files import ShardedWrite, request_shards
from tests.support.checkpoints import same_state
from tests.support.launch import TIMEOUT_S
from tests.support.thread_comm import ThreadComm, on_ranks


class Writer(CheckpointWriter):
    """One that keeps what it reports, with a clock that stands still."""

    def __init__(self, comm: Any, folder: Path) -> None:
        self.events: list[dict[str, Any]] = []
        self.warnings: list[str] = []
        self.now_s = 0.0
        store = CheckpointStore(folder / "checkpoints", self.warnings.append) if comm.rank == 0 else None
        report, clock = (self.events.append, self.warnings.append), lambda: self.now_s
        super().__init__(comm, store, 3, *report, min_bytes=1000, clock=clock)

    def names(self) -> list[str]:
        return [event["event"] for event in self.events]


def _state(step: int, width: int = 1000) -> StateDict:
    model = {f"w{n}": torch.full((width + n,), float(step)) for n in range(5)} | {"alone": torch.tensor(step)}
    return StateDict({"model": model, "optimizer": {}}, {"progress": {"step": step}})


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    gate = threading.Event()
    real = shard_files.write_shard

    def write(*arguments: Any) -> Any:
        assert gate.wait(TIMEOUT_S)
        return real(*arguments)

    for module in (shard_files, checkpoint_store):
        monkeypatch.setattr(module, "write_shard", write)
    return gate


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_state_of_the_step_is_written_whatever_changes_meanwhile(
    size: int, tmp_path: Path, slow_disk: threading.Event
) -> None:
    def body(comm: ThreadComm) -> Writer:
        writer, state = Writer(comm, tmp_path), _state(1)
        with writer.opened():
            writer.save(1, state, {"heldout_loss": 1.0}, wait=False)
            for tensor in state.tensors["model"].values():
                tensor.fill_(-1)
            assert writer.poll() == 0
            assert writer.events == [], "nothing is told before it is on the disk"
            comm.barrier()
            slow_disk.set()
        return writer

    (event,) = on_ranks(size, body, at_once=True)[0].events
    assert event == {"event": "checkpoint", "at_step": 1, "path": "step-000001"}
    folder = tmp_path / "checkpoints"
    assert [path.name for path in folder.glob("step-*")] == ["step-000001"]
    assert len(list((folder / "step-000001").glob("model*.safetensors"))) == size
    assert {path.suffix for path in (folder / "step-000001").iterdir()} == {".json", ".safetensors"}
    assert same_state(load(folder / "step-000001"), _state(1))


def test_a_save_waits_for_the_one_before(tmp_path: Path, slow_disk: threading.Event) -> None:
    """The copy that is being written is not written over."""
    writer = Writer(SoloComm(), tmp_path)
    with writer.opened():
        writer.save(1, _state(1), {}, wait=False)
        second = threading.Thread(target=lambda: writer.save(2, _state(2), {}, wait=False))
        second.start()
        second.join(0.05)
        assert second.is_alive()
        slow_disk.set()
        second.join()
    assert [event["at_step"] for event in writer.events] == [1, 2]
    for step in (1, 2):
        assert same_state(load(tmp_path / f"checkpoints/step-{step:06d}"), _state(step))


def _full(monkeypatch: pytest.MonkeyPatch, number: int, rank: int) -> Callable[[], None]:
    """From now on writing tensors fails on `rank`; what mends it."""
    real = shard_files.write_shard
    broken = [True]

    def write(folder: Path, writer: int, *rest: Any) -> Any:
        if broken[0] and writer == rank:
            (folder / "model-half.safetensors").write_bytes(b"half")
            raise OSError(number, os.strerror(number))
        return real(folder, writer, *rest)

    for module in (shard_files, checkpoint_store):
        monkeypatch.setattr(module, "write_shard", write)
    return lambda: broken.__setitem__(0, False)


@pytest.mark.parametrize(("number", "rank"), [(errno.ENOSPC, 0), (errno.EDQUOT, 1), (errno.EROFS, 0), (errno.EIO, 1)])
def test_a_failed_save_of_any_rank_is_reported_and_tried_again(
    number: int, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mend = _full(monkeypatch, number, rank)

    def body(comm: ThreadComm) -> Writer:
        writer = Writer(comm, tmp_path)
        with writer.opened():
            writer.save(1, _state(1), {}, wait=False)
            writer._join()
            assert writer.poll() == 0, "not at once"
            writer.now_s += 10
            assert writer.poll() == (comm.rank == 0)
            comm.barrier()
            mend()
            writer.save(2, _state(2), {}, wait=False)
            writer._join()
            assert writer.poll() == 0
        return writer

    writer = on_ranks(2, body, at_once=True)[0]
    assert writer.names() == ["checkpoint_failed", "checkpoint"]
    assert os.strerror(number) in writer.events[0]["error"]
    (warning,) = writer.warnings
    assert "no checkpoint yet" in warning
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]


def test_due_saves_are_tried_and_reported_only_for_a_new_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mend = _full(monkeypatch, errno.ENOSPC, 0)
    writer = Writer(SoloComm(), tmp_path)
    asked_at: list[float] = []

    def save(step: int) -> None:
        writer.save(step, _state(step), {}, wait=False)
        writer.wait()

    with writer.opened():
        for step in range(1, 60):  # one every 2 s
            save(step)
            writer.now_s += 2
            if writer.poll():
                asked_at.append(writer.now_s)
        assert asked_at == [10, 30, 70]
        failed = [event for event in writer.events if event["event"] == "checkpoint_failed"]
        assert len(failed) == 59, "each was tried"
        assert [float(text.partition("in at most ")[2].split()[0]) for text in writer.warnings] == [10, 20, 40, 80]
        assert [event["retry_s"] for event in failed[:7]] == [10, 8, 6, 4, 2, 20, 18]
        mend()
        mend_again = _full(monkeypatch, errno.EROFS, 0)
        save(60)
        assert os.strerror(errno.EROFS) in writer.warnings[-1] and len(writer.warnings) == 5
        mend_again()
        save(61)
        writer.now_s += 1e6
        assert not writer.poll(), "a later save was the retry"
        save(62)
    assert [event.get("why") for event in writer.events[-2:]] == ["after saves that failed", None]


@pytest.mark.parametrize("fault", ["folder", "rank 0", "rank 1"])
def test_a_last_save_that_fails_is_an_error_on_every_rank(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "folder":
        (tmp_path / "checkpoints").write_text("in the way")
    else:
        _full(monkeypatch, errno.ENOSPC, int(fault[-1]))

    def body(comm: ThreadComm) -> Writer:
        writer = Writer(comm, tmp_path)
        with writer.opened():
            writer.save(1, _state(1), {}, wait=False)
            with pytest.raises(CheckpointError, match="step 2 could not be written"):
                writer.save(2, _state(2), {}, wait=True)
        return writer

    assert on_ranks(2, body, at_once=True)[0].names() == ["checkpoint_failed"], "what training survives is an event"


def test_a_silent_rank_is_not_waited_for_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At step 2 rank 1 writes its files and is gone before it has said so; patience is short."""
    write_on_other_rank, gather = ShardedWrite.write_on_other_rank, ShardedWrite.gather

    def write_and_go(self: ShardedWrite, number: int, progress: Callable[[], None]) -> None:
        if self.step == 1:
            write_on_other_rank(self, number, progress)
        else:
            shard_files.write_shard(self.folder, number, self.count, self.own_state(), progress)

    def gather_soon(self: ShardedWrite, *what: Any) -> Any:
        return gather(self, *what, timeout_s=TIMEOUT_S if self.step == 1 else 0.0)

    monkeypatch.setattr(ShardedWrite, "write_on_other_rank", write_and_go)
    monkeypatch.setattr(ShardedWrite, "gather", gather_soon)
    writer = _save_on_two_ranks(tmp_path, 1, 2)
    assert writer.names() == ["checkpoint", "checkpoint_failed"]
    assert "rank 1 has not written its part" in writer.events[1]["error"]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]


def _save_on_two_ranks(folder: Path, *steps: int) -> Writer:
    def body(comm: ThreadComm) -> Writer:
        writer = Writer(comm, folder)
        with writer.opened():
            for step in steps:
                writer.save(step, _state(step), {}, wait=False)
        return writer

    return on_ranks(2, body, at_once=True)[0]


def test_an_error_of_the_run_waits_for_no_other_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 dies while it writes; rank 0 hears of that as an error of a collective."""
    monkeypatch.setattr(ShardedWrite, "write_on_other_rank", lambda *arguments: None)

    def body(comm: ThreadComm) -> None:
        writer = Writer(comm, tmp_path)
        with pytest.raises(RuntimeError, match="the other is gone"), writer.opened():
            writer.save(1, _state(1), {}, wait=False)
            raise RuntimeError("the other is gone")

    on_ranks(2, body, at_once=True)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_an_error_of_the_run_leaves_time_for_the_write_of_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_writer, "_PATIENCE_S", TIMEOUT_S)
    writer = Writer(SoloComm(), tmp_path)
    with pytest.raises(RuntimeError), writer.opened():
        writer.save(1, _state(1), {}, wait=False)
        raise RuntimeError
    assert same_state(load(tmp_path / "checkpoints/step-000001"), _state(1))
    assert writer.names() == ["checkpoint"]


def test_orphans_are_removed_at_the_start_but_not_files_being_written(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    store = CheckpointStore(folder, pytest.fail)
    living = store.begin(7, 1)
    dead = folder / living.name.replace(f"-{os.getpid()}-", "-4194305-")  # above the highest number of a process
    dead.mkdir()
    (dead / "model.safetensors").write_bytes(b"half")
    far = folder / ".writing-step-000007-0123abcd-1-another-host"
    far.mkdir()
    writer = Writer(SoloComm(), tmp_path)
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
            Writer(comm, tmp_path).save(1, state, {}, wait=False)

    on_ranks(2, body, at_once=True)


def test_ranks_that_see_other_files_leave_all_to_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: real(path) and not path.name.startswith(".shared-"))
    _save_on_two_ranks(tmp_path, 1)
    assert [path.name for path in (tmp_path / "checkpoints/step-000001").glob("model*s")] == ["model.safetensors"]


def test_a_part_with_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    request_shards(tmp_path, 2)
    mine = StateDict({"model": {"a": torch.ones(2)}}, {})
    write = ShardedWrite(tmp_path, 3, 2, lambda: mine, 2, {}, None)
    write.write_on_other_rank(1, lambda: None)
    with pytest.raises(OSError, match="written 1 tensors instead of 2"):
        write.gather(lambda: None, threading.Event())
