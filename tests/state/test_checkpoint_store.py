"""A checkpoint is whole or not there; what was saved before is never touched."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch import nn

from hvdtrain.comm.solo import SoloComm
from hvdtrain.errors import CheckpointError, TaskError
from hvdtrain.state.background_writer import CheckpointWriter
from hvdtrain.state.checkpoint_store import CheckpointStore, Measure, load
from hvdtrain.state.manifest import MANIFEST, manifest_text
from hvdtrain.state.pieces import StateDict
from hvdtrain.state.stored_file import FileDigest
from hvdtrain.state.train_state import Progress, TrainState
from tests.support.checkpoints import same_state, save
from tests.support.full_disk import room_for
from tests.support.toy import Net


class Counts(torch.optim.SGD):
    """Keeps a plain number of each parameter, and one of each group."""

    def step(self, closure=None):  # type: ignore[no-untyped-def]
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for parameter in group["params"]:
                self.state[parameter]["n"] = self.state[parameter].get("n", 0) + 1
        return super().step(closure)


def _of(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 0) -> TrainState:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return TrainState(model, optimizer, scaler, Progress(step=steps, position=10 * steps))


def _state(seed: int = 0, steps: int = 2, optimizer: type = torch.optim.AdamW) -> TrainState:
    torch.manual_seed(seed)
    model = Net(8, 0.0)
    made = optimizer(model.parameters(), lr=0.01)
    state = _of(model, made, steps)
    for _ in range(steps):
        made.zero_grad()
        model(torch.randn(3, 6)).sum().backward()
        made.step()
    return state


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path: Path, warnings: list[str]) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", warnings.append)


def _newest(store: CheckpointStore) -> Path:
    found = store.load_newest()
    assert found is not None
    return found[0].path


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.NAdam, Counts])
def test_the_saved_state_is_loaded(store: CheckpointStore, optimizer: type) -> None:
    state = _state(optimizer=optimizer)
    save(store, 2, state.state_dict())
    other = _state(seed=1, steps=0, optimizer=optimizer)
    found = store.load_newest()
    assert found is not None
    other.load_state_dict(found[1])
    assert same_state(other.state_dict(), state.state_dict())
    for each in (state, other):
        each.optimizer.zero_grad()
        each.model(torch.ones(2, 6)).sum().backward()
        each.optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(state.model.parameters(), other.model.parameters(), strict=True))


def test_optimizer_state_is_kept_by_name_whatever_the_groups() -> None:
    state, model = _state(), Net(8, 0.0)
    parameters = list(model.parameters())
    regrouped = torch.optim.AdamW([{"params": parameters[3:]}, {"params": parameters[:3]}], lr=0.01)
    other = _of(model, regrouped)
    other.load_state_dict(state.state_dict())
    assert same_state(other.state_dict(), state.state_dict())


def test_counters_in_optimizer_groups_are_kept_but_no_options() -> None:
    states = []
    for momentum in (0.5, 0.9):  # the options have changed since
        model = nn.Linear(1, 1)
        states.append(_of(model, Counts(model.parameters(), lr=0.1, momentum=momentum)))
    states[0].model(torch.ones(1, 1)).sum().backward()
    states[0].optimizer.step()
    states[1].load_state_dict(states[0].state_dict())
    (group,) = states[1].optimizer.param_groups
    assert (group["k"], group["momentum"]) == (1, 0.9)


def test_optimizer_state_that_cannot_be_saved_is_refused() -> None:
    state = _state()
    state.optimizer.state[next(state.model.parameters())]["history"] = [torch.zeros(1)]
    with pytest.raises(TaskError, match="history of"):
        state.state_dict()


def test_the_loss_scale_is_kept() -> None:
    def made(steps: int) -> TrainState:
        state = _state(steps=0)
        state.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        for _ in range(steps):
            state.scaler.scale(state.model(torch.randn(3, 6)).sum()).backward()
            state.scaler.step(state.optimizer)
            state.scaler.update()
        return state

    first, second = made(3), made(0)
    second.load_state_dict(first.state_dict())
    assert second.scaler.state_dict() == first.scaler.state_dict()
    assert second.scaler.get_scale() == 32.0


def test_tied_weights_are_kept_once(store: CheckpointStore) -> None:
    def state(seed: int) -> TrainState:
        torch.manual_seed(seed)
        model = nn.ModuleDict({"embedding": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
        model["head"].weight = model["embedding"].weight
        return _of(model, torch.optim.SGD(model.parameters(), lr=0.1))

    path = save(store, 1, state(0).state_dict())
    assert list(load(path).tensors["model"]) == ["embedding.weight"]
    other = state(1)
    other.load_state_dict(load(path))
    head, embedding = other.model["head"], other.model["embedding"]  # type: ignore[index]
    assert torch.equal(head.weight, state(0).model["head"].weight)  # type: ignore[index]
    assert head.weight is embedding.weight


def test_another_model_changes_nothing() -> None:
    model = Net(8, 0.0)
    model.extra = nn.Linear(2, 2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        _of(model, torch.optim.SGD(model.parameters(), lr=0.1)).load_state_dict(_state().state_dict())
    assert "extra.bias" in str(caught.value.expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_manifest_names_all_files_and_none_is_a_pickle(store: CheckpointStore) -> None:
    path = save(store, 7, _state().state_dict(), {"heldout_loss": 1.5})
    manifest = json.loads((path / MANIFEST).read_text())
    assert (manifest["format"], manifest["step"], manifest["heldout_loss"]) == (2, 7, 1.5)
    assert sorted(manifest["files"]) == sorted(p.name for p in path.iterdir() if p.name != MANIFEST)
    assert sorted(p.suffix for p in path.iterdir()) == [".json", ".json", ".safetensors", ".safetensors"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 2}', '{"files": {"a": {}}}'])
def test_a_manifest_that_lacks_something_is_damaged(store: CheckpointStore, warnings: list[str], text: str) -> None:
    (save(store, 1, _state().state_dict()) / MANIFEST).write_text(text)
    assert store.load_newest() is None
    assert ["is damaged" in text for text in warnings] == [True]


@pytest.mark.parametrize(
    ("removed", "changed", "damaged"),
    [
        ((), {"format": 99}, True),
        (("format",), {}, True),
        (("xxh3_128",), {}, True),
        ((), {"step": 3}, True),
        *((("xxh3_128",), {"format": number}, False) for number in (1, 99)),
    ],
)
def test_a_manifest_that_was_changed_is_damaged_and_not_of_another_format(
    store: CheckpointStore, warnings: list[str], removed: tuple[str, ...], changed: dict[str, int], damaged: bool
) -> None:
    file = save(store, 2, _state().state_dict()) / MANIFEST
    manifest = {key: value for key, value in json.loads(file.read_text()).items() if key not in removed}
    file.write_text(json.dumps(manifest | changed))
    assert store.load_newest() is None
    assert ["is damaged" in text for text in warnings] == [damaged]
    assert ["a format that this version cannot read" in text for text in warnings] == [not damaged]


def test_saving_a_step_again_leaves_the_old_one(store: CheckpointStore) -> None:
    old = save(store, 3, _state(seed=0).state_dict())
    before = {p.name: p.read_bytes() for p in old.iterdir()}
    new = save(store, 3, _state(seed=1).state_dict())
    assert new != old and _newest(store) == new
    assert {p.name: p.read_bytes() for p in old.iterdir()} == before


@pytest.mark.parametrize("best", ["loss", "right:max", "wrong", "wrong:min"])
def test_retention_keeps_the_last_and_the_best(best: str, store: CheckpointStore) -> None:
    store.best = Measure.parse(best)
    snapshot = _state().state_dict()
    for step, loss in enumerate([5.0, 2.0, 3.0, None, 4.0, 6.0], start=1):
        notes = {"heldout_loss": loss, "metrics": {"right": -loss, "wrong": loss} if loss else {}}
        store.remove_old(2, save(store, step, snapshot, notes))
    assert [saved.step for saved in store.list()] == [2, 5, 6]
    names = ["best", "step-000002", "step-000005", "step-000006"]
    assert sorted(p.name for p in store.directory.iterdir()) == names
    assert (store.directory / "best").readlink() == Path("step-000002")
    store.set_aside_after(None)
    assert not (store.directory / "best").is_symlink()


def test_leftovers_of_a_kill_are_removed_and_never_loaded(store: CheckpointStore) -> None:
    (store.directory / ".writing-step-000009-1").mkdir(parents=True)
    (store.directory / ".removing-step-000001").mkdir()
    assert store.load_newest() is None
    store.remove_old(3, save(store, 1, _state().state_dict()))
    assert [p.name for p in store.directory.iterdir()] == ["step-000001"]


def test_the_newest_checkpoint_is_kept_whatever_else_exists(store: CheckpointStore, warnings: list[str]) -> None:
    """Going back to step 1 leaves newer checkpoints behind: they neither push out the new ones nor come back."""
    snapshot = _state().state_dict()
    for step in (1, 2, 3, 4):
        save(store, step, snapshot)
    for step in (3, 4):
        (store.directory / f"step-{step:06d}" / "state.json").unlink()
    assert _newest(store).name == "step-000002"
    store.remove_old(1, save(store, 2, snapshot))
    assert (2, 1) in [(saved.step, saved.again) for saved in store.list()]
    first = store.list()[0]
    store.set_aside_after(first)
    assert store.list() == [first]
    assert len(list(store.directory.glob("set-aside-*"))) == 1
    assert any("is set aside as" in warning for warning in warnings)


def test_nothing_is_removed_before_the_new_checkpoint_is_verified(store: CheckpointStore, warnings: list[str]) -> None:
    """A disk that does not give back what it was given must not cost the last checkpoint that is whole."""
    before, newest = (save(store, step, _state().state_dict()) for step in (1, 2))
    file = newest / "optimizer.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(CheckpointError, match="step-000002"):
        store.remove_old(1, newest)
    assert [saved.step for saved in store.list()] == [1]
    assert (store.directory / "set-aside-0-step-000002").is_dir()
    assert _newest(store) == before and warnings == []


def test_a_full_disk_while_writing_tensors(store: CheckpointStore) -> None:
    state = StateDict({"model": {"w": torch.zeros(100_000)}, "optimizer": {}}, {})
    path = save(store, 1, state)
    with room_for(path / "model.safetensors", -1), pytest.raises(CheckpointError, match="step 2"):
        save(store, 2, state)
    assert list(store.directory.iterdir()) == [path]


def _save_until_killed(folder: Path, told: int) -> None:
    torch.set_num_threads(1)  # a fork has no other threads
    tensors = {"model": {"w": torch.zeros(1_000_000)}, "optimizer": {}}

    def tell(event: dict[str, object]) -> None:
        os.write(told, f"{event['at_step']}\n".encode())

    writer = CheckpointWriter(SoloComm(), CheckpointStore(folder, print), 2, tell, print)
    step = 0
    while True:
        step += 1
        tensors["model"]["w"] += 1
        writer.save(step, StateDict(tensors, {"progress": {"step": step}}), {}, wait=step % 3 == 0)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("moment", range(5))
def test_sigkill_while_saving_loses_nothing_that_was_saved(tmp_path: Path, moment: int) -> None:
    reading, writing = os.pipe()
    process = multiprocessing.get_context("fork").Process(target=_save_until_killed, args=(tmp_path, writing))
    process.start()
    os.close(writing)
    with os.fdopen(reading) as told:
        for _ in range(3):
            reported = int(told.readline())
        deadline = time.monotonic() + 0.003 * moment
        while time.monotonic() < deadline:
            pass
        process.kill()
        reported = max([reported, *map(int, told.read().split())])
    process.join()
    found = CheckpointStore(tmp_path, pytest.fail).load_newest()
    assert found is not None
    saved, state = found
    assert saved.step >= reported
    assert state.values == {"progress": {"step": saved.step}}
    assert torch.equal(state.tensors["model"]["w"], torch.full((1_000_000,), float(saved.step)))


def test_progress_is_reported_while_files_are_written_and_read(tmp_path: Path) -> None:
    moves: list[int] = []
    store = CheckpointStore(tmp_path, pytest.fail, lambda: moves.append(1))
    state = _state().state_dict()
    mib = {"big": torch.zeros(5 << 20, dtype=torch.uint8)}
    path = save(store, 1, StateDict({**state.tensors, "model": mib}, state.values))
    files = len(list(path.iterdir()))
    assert len(moves) >= 5 + 2 * files - 2, "each MiB that is verified, each file written and on the disk"
    moves.clear()
    assert store.load_newest() is not None
    assert len(moves) >= 5 + files - 1


def _forge(path: Path, name: str, content: bytes) -> None:
    (path / name).write_bytes(content)
    manifest = json.loads((path / MANIFEST).read_text())
    files = {each: FileDigest(has["bytes"], has["xxh3_128"]) for each, has in manifest["files"].items()}
    files[name] = FileDigest(len(content), xxhash.xxh3_128(content).hexdigest())
    (path / MANIFEST).write_text(manifest_text(manifest["step"], {}, files))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"position": -5}, "position of its progress is -5"),
        ({"position": 1}, "position 1 after 2 steps"),
        ({"step": 1}, "contains step 1 instead of step 2"),
        ({"step": 10**9, "position": 10**10}, "contains step 1000000000 instead of step 2"),
        ({"samples": "many"}, "samples of its progress is 'many'"),
        ({"lead": 3}, r"(?s)this version does not know.*progress\.lead"),
    ],
)
def test_a_forged_progress_is_refused(store: CheckpointStore, changed: dict[str, Any], words: str) -> None:
    path = save(store, 2, _state().state_dict())
    values = json.loads((path / "state.json").read_text())
    values["progress"] |= changed
    _forge(path, "state.json", json.dumps(values).encode())
    with pytest.raises(CheckpointError, match=words):
        load(path)


def test_values_of_a_newer_version_and_a_fifo_are_refused(store: CheckpointStore) -> None:
    path = save(store, 2, _state().state_dict())
    _forge(path, "optimizer.safetensors", b"")
    (path / "optimizer.safetensors").unlink()
    os.mkfifo(path / "optimizer.safetensors")
    with pytest.raises(CheckpointError, match="it is a FIFO"):
        load(path)
    path = save(store, 3, StateDict(_state().state_dict().tensors, {"newer": 1}))
    with pytest.raises(CheckpointError, match=r"(?s)step-000003 has values that this version does not know.*newer"):
        load(path)
