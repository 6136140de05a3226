"""A checkpoint is whole or not there; what was saved before is never touched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hvdtrain.errors import CheckpointError, TaskError
from hvdtrain.state.checkpoint_store import CheckpointStore, load
from hvdtrain.state.manifest import MANIFEST
from hvdtrain.state.pieces import StateDict
from hvdtrain.state.train_state import Progress, TrainState
from tests.support.checkpoints import save
from tests.support.toy import Net


def _state(seed: int = 0, steps: int = 2, optimizer: type = torch.optim.AdamW) -> TrainState:
    torch.manual_seed(seed)
    model = Net(8, 0.0)
    made = optimizer(model.parameters(), lr=0.01)
    for _ in range(steps):
        made.zero_grad()
        model(torch.randn(3, 6)).sum().backward()
        made.step()
    return TrainState(
        model, made, torch.amp.GradScaler("cpu", enabled=False), Progress(step=steps, position=10 * steps)
    )


def _store(tmp_path: Path) -> tuple[CheckpointStore, list[str]]:
    warnings: list[str] = []
    return CheckpointStore(tmp_path / "checkpoints", warnings.append), warnings


def _equal(a: StateDict, b: StateDict) -> bool:
    return a.values == b.values and all(
        a.tensors[g].keys() == b.tensors[g].keys()
        and all(torch.equal(a.tensors[g][n], b.tensors[g][n]) for n in a.tensors[g])
        for g in ("model", "optimizer")
    )


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.NAdam])
def test_the_saved_state_is_loaded(tmp_path: Path, optimizer: type) -> None:
    store, _ = _store(tmp_path)
    state = _state(optimizer=optimizer)
    save(store, 2, state.state_dict())
    other = _state(seed=1, steps=0, optimizer=optimizer)
    found = store.load_newest()
    assert found is not None
    other.load_state_dict(found[1])
    assert _equal(other.state_dict(), state.state_dict())
    for each in (state, other):
        each.optimizer.zero_grad()
        each.model(torch.ones(2, 6)).sum().backward()
        each.optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(state.model.parameters(), other.model.parameters(), strict=True))


def test_optimizer_state_is_kept_by_name_whatever_the_groups(tmp_path: Path) -> None:
    state = _state()
    model = Net(8, 0.0)
    parameters = list(model.parameters())
    regrouped = torch.optim.AdamW([{"params": parameters[3:]}, {"params": parameters[:3]}], lr=0.01)
    other = TrainState(model, regrouped, torch.amp.GradScaler("cpu", enabled=False), Progress())
    other.load_state_dict(state.state_dict())
    assert _equal(other.state_dict(), state.state_dict())


def test_tied_weights_are_kept_once(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embedding.weight

    def state(seed: int) -> TrainState:
        torch.manual_seed(seed)
        model = Tied()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return TrainState(model, optimizer, torch.amp.GradScaler("cpu", enabled=False), Progress())

    store, _ = _store(tmp_path)
    path = save(store, 1, state(0).state_dict())
    assert list(load(path).tensors["model"]) == ["embedding.weight"]
    other = state(1)
    other.load_state_dict(load(path))
    assert torch.equal(other.model.head.weight, state(0).model.head.weight)
    assert other.model.head.weight is other.model.embedding.weight


def test_another_model_changes_nothing() -> None:
    class Bigger(Net):
        def __init__(self) -> None:
            super().__init__(8, 0.0)
            self.extra = nn.Linear(2, 2)

    model = Bigger()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    target = TrainState(
        model, torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", enabled=False), Progress()
    )
    with pytest.raises(CheckpointError, match="does not match the model") as caught:
        target.load_state_dict(_state().state_dict())
    assert "extra.bias" in str(caught.value.expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_no_file_is_a_pickle(tmp_path: Path) -> None:
    store, _ = _store(tmp_path)
    path = save(store, 1, _state().state_dict())
    assert sorted(p.suffix for p in path.iterdir()) == [".json", ".json", ".safetensors", ".safetensors"]


@settings(max_examples=25)
@given(data=st.data())
def test_any_damage_is_named_and_passed_over(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Flip a byte, cut the end or remove any file of the newest: the one before is loaded."""
    store, warnings = _store(tmp_path_factory.mktemp("store"))
    save(store, 1, _state(steps=1).state_dict())
    newest = save(store, 2, _state(steps=2).state_dict())
    file = data.draw(st.sampled_from(sorted(p for p in newest.iterdir() if p.name != MANIFEST)))
    content = file.read_bytes()
    place = data.draw(st.integers(0, len(content) - 1))
    match data.draw(st.sampled_from(["flip", "cut", "remove"])):
        case "flip":
            file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        case "cut":
            file.write_bytes(content[:place])
        case "remove":
            file.unlink()
    found = store.load_newest()
    assert found is not None
    assert found[0].step == 1
    assert len(warnings) == 1
    assert str(file) in warnings[0]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"format": 99}',
        '{"format": 1}',
        '{"format": 1, "files": 3}',
        '{"format": 1, "files": {"a": {}}}',
    ],
)
def test_a_damaged_manifest_is_passed_over(tmp_path: Path, content: str) -> None:
    store, warnings = _store(tmp_path)
    path = save(store, 1, _state().state_dict())
    (path / MANIFEST).write_text(content)
    assert store.load_newest() is None
    assert len(warnings) == 1


@pytest.mark.parametrize(
    ("change", "damaged"),
    [
        (lambda manifest: manifest.update(format=99), True),
        (lambda manifest: manifest.pop("format"), True),
        (lambda manifest: manifest.pop("xxh3_128"), True),
        (lambda manifest: manifest.update(step=3), True),
        (lambda manifest: [manifest.pop("xxh3_128"), manifest.update(format=99)], False),
    ],
)
def test_a_manifest_that_was_changed_is_damaged_and_not_of_another_format(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], damaged: bool
) -> None:
    store, warnings = _store(tmp_path)
    file = save(store, 2, _state().state_dict()) / MANIFEST
    manifest = json.loads(file.read_text())
    change(manifest)
    file.write_text(json.dumps(manifest))
    assert store.load_newest() is None
    assert ["is damaged" in text for text in warnings] == [damaged]
    assert ["a format that this version cannot read" in text for text in warnings] == [not damaged]


def test_saving_a_step_again_leaves_the_old_one(tmp_path: Path) -> None:
    store, _ = _store(tmp_path)
    old = save(store, 3, _state(seed=0).state_dict())
    before = {p.name: p.read_bytes() for p in old.iterdir()}
    new = save(store, 3, _state(seed=1).state_dict())
    assert new != old
    assert {p.name: p.read_bytes() for p in old.iterdir()} == before
    found = store.load_newest()
    assert found is not None and found[0].path == new


def test_retention_keeps_the_last_and_the_best(tmp_path: Path) -> None:
    store, _ = _store(tmp_path)
    snapshot = _state().state_dict()
    for step, loss in enumerate([5.0, 2.0, 3.0, None, 4.0, 6.0], start=1):
        store.remove_old(2, save(store, step, snapshot, {"heldout_loss": loss}))
    assert [saved.step for saved in store.list()] == [2, 5, 6]
    assert sorted(p.name for p in store.directory.iterdir()) == ["step-000002", "step-000005", "step-000006"]


def test_leftovers_of_a_kill_are_removed_and_never_loaded(tmp_path: Path) -> None:
    store, _ = _store(tmp_path)
    (store.directory / ".writing-step-000009-1").mkdir(parents=True)
    (store.directory / ".removing-step-000001").mkdir()
    assert store.load_newest() is None
    store.remove_old(3, save(store, 1, _state().state_dict()))
    assert [p.name for p in store.directory.iterdir()] == ["step-000001"]


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = CheckpointStore(tmp_path / "file" / "checkpoints", print)
    with pytest.raises(CheckpointError, match="step 4 could not be written"):
        save(store, 4, _state().state_dict())


_SAVER = """
import sys
from pathlib import Path
import torch
from hvdtrain.comm.solo import SoloComm
from hvdtrain.state.checkpoint_store import CheckpointStore
from hvdtrain.state.pieces import StateDict
from hvdtrain.state.background_writer import CheckpointWriter
store = CheckpointStore(Path(sys.argv[1]), print)
tensors = {"model": {"w": torch.zeros(1_000_000)}, "optimizer": {}}
step = 0
told = lambda event: print(event["at_step"], flush=True)
writer = CheckpointWriter(SoloComm(), store, 2, told, print)
while True:
    step += 1
    tensors["model"]["w"] += 1
    writer.save(step, StateDict(tensors, {"step": step}), {}, wait=step % 3 == 0)
"""


@pytest.mark.parametrize("moment", range(5))
def test_sigkill_while_saving_loses_nothing_that_was_saved(tmp_path: Path, moment: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", _SAVER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(3):
        reported = int(process.stdout.readline())
    deadline = time.monotonic() + 0.003 * moment
    while time.monotonic() < deadline:
        pass
    os.kill(process.pid, signal.SIGKILL)
    reported = max([reported, *map(int, process.stdout.read().split())])
    process.wait()
    process.stdout.close()
    warnings: list[str] = []
    store = CheckpointStore(tmp_path, warnings.append)
    found = store.load_newest()
    assert found is not None
    saved, state = found
    assert saved.step >= reported
    assert state.values == {"step": saved.step}
    assert torch.equal(state.tensors["model"]["w"], torch.full((1_000_000,), float(saved.step)))
    assert warnings == []


def test_the_manifest_names_its_format(tmp_path: Path) -> None:
    store, _ = _store(tmp_path)
    path = save(store, 7, _state().state_dict(), {"heldout_loss": 1.5})
    manifest = json.loads((path / MANIFEST).read_text())
    assert (manifest["format"], manifest["step"], manifest["heldout_loss"]) == (2, 7, 1.5)
    assert sorted(manifest["files"]) == sorted(p.name for p in path.iterdir() if p.name != MANIFEST)


def test_the_newest_checkpoint_is_kept_whatever_else_exists(tmp_path: Path) -> None:
    """Going back to step 1 leaves newer checkpoints behind: they neither push out the new ones nor come back."""
    store, warnings = _store(tmp_path)
    snapshot = _state().state_dict()
    for step in (1, 2, 3, 4):
        save(store, step, snapshot)
    for step in (3, 4):
        (store.directory / f"step-{step:06d}" / "state.json").unlink()
    found = store.load_newest()
    assert found is not None and found[0].step == 2
    store.remove_old(1, save(store, 2, snapshot))
    assert (2, 1) in [(saved.step, saved.again) for saved in store.list()]
    first = store.list()[0]
    store.set_aside_after(first)
    assert store.list() == [first]
    assert len(list(store.directory.glob("set-aside-*"))) == 1
    assert any("is set aside as" in warning for warning in warnings)


def test_a_leftover_of_the_same_process_number_is_no_obstacle(tmp_path: Path) -> None:
    store, _ = _store(tmp_path)
    (store.directory / f".writing-step-000004-{os.getpid()}" / "x").mkdir(parents=True)
    assert save(store, 4, _state().state_dict()).name == "step-000004"


def test_a_full_disk_while_writing_tensors(tmp_path: Path) -> None:
    """RLIMIT_FSIZE simulates a full disk: a write fails in the middle of a file."""
    program = (
        "import resource, signal, sys\nfrom pathlib import Path\nimport torch\n"
        "from hvdtrain.errors import CheckpointError\nfrom hvdtrain.state.checkpoint_store import CheckpointStore\n"
        "from tests.support.checkpoints import save\n"
        "from hvdtrain.state.pieces import StateDict\n"
        "store = CheckpointStore(Path(sys.argv[1]), print)\n"
        "state = StateDict({'model': {'w': torch.zeros(100_000)}, 'optimizer': {}}, {})\n"
        "save(store, 1, state)\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try:\n    save(store, 2, state)\nexcept CheckpointError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "the checkpoint of step 2 could not be written" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_counters_in_optimizer_groups_are_kept(tmp_path: Path) -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure=None):  # type: ignore[no-untyped-def]
            for group in self.param_groups:
                group["k"] = group.get("k", 0) + 1
            return super().step(closure)

    def state(momentum: float) -> TrainState:
        model = nn.Linear(1, 1)
        optimizer = Counting(model.parameters(), lr=0.1, momentum=momentum)
        return TrainState(model, optimizer, torch.amp.GradScaler("cpu", enabled=False), Progress())

    first, second = state(0.5), state(0.9)  # the options have changed since
    first.model(torch.ones(1, 1)).sum().backward()
    first.optimizer.step()
    second.load_state_dict(first.state_dict())
    assert (second.optimizer.param_groups[0]["k"], second.optimizer.param_groups[0]["momentum"]) == (1, 0.9)


def test_optimizer_state_that_cannot_be_saved_is_refused() -> None:
    state = _state()
    state.optimizer.state[next(state.model.parameters())]["history"] = [torch.zeros(1)]
    with pytest.raises(TaskError, match="history of"):
        state.state_dict()


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


def test_nothing_is_removed_before_the_new_checkpoint_is_verified(tmp_path: Path) -> None:
    """A disk that does not give back what it was given must not cost the last checkpoint that is whole."""
    store, warnings = _store(tmp_path)
    snapshot = _state().state_dict()
    save(store, 1, snapshot)
    newest = save(store, 2, snapshot)
    file = newest / "optimizer.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(CheckpointError, match="step-000002 was written, but the disk returns other bytes"):
        store.remove_old(1, newest)
    assert [saved.step for saved in store.list()] == [1]
    assert (store.directory / "set-aside-0-step-000002").is_dir()
    found = store.load_newest()
    assert found is not None and found[0].step == 1
    assert warnings == []


_FORMAT_1 = """
import hashlib, json, sys
from pathlib import Path
import safetensors.torch, torch
folder = Path(sys.argv[1])
folder.mkdir(parents=True)
safetensors.torch.save_file({"w": torch.arange(4.0), "t": torch.ones(2, 3).bfloat16()}, folder / "model.safetensors")
safetensors.torch.save_file({}, folder / "optimizer.safetensors")
(folder / "state.json").write_text(json.dumps({"progress": {"step": 5}}))
files = {}
for path in sorted(folder.iterdir()):
    files[path.name] = {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
manifest = {"format": 1, "step": 5, "heldout_loss": 1.5, "files": files}
(folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
"""


def test_format_1_is_still_read(tmp_path: Path) -> None:
    path = tmp_path / "step-000005"
    subprocess.run([sys.executable, "-c", _FORMAT_1, str(path)], check=True)
    warnings: list[str] = []
    found = CheckpointStore(tmp_path, warnings.append).load_newest()
    assert found is not None and found[0].step == 5
    assert found[1].values == {"progress": {"step": 5}}
    assert found[1].tensors["optimizer"] == {}
    assert torch.equal(found[1].tensors["model"]["w"], torch.arange(4.0))
    content = bytearray((path / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        load(path)
    (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        load(path)


class Counts(torch.optim.SGD):
    """Keeps a plain number of each parameter."""

    def step(self, closure=None):  # type: ignore[no-untyped-def]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["n"] = self.state[parameter].get("n", 0) + 1
        return super().step(closure)


def test_a_plain_number_of_a_parameter_is_kept() -> None:
    first, second = _state(steps=3, optimizer=Counts), _state(seed=1, steps=1, optimizer=Counts)
    second.load_state_dict(first.state_dict())
    assert {slots["n"] for slots in second.optimizer.state.values()} == {3}
    assert second.state_dict().values == first.state_dict().values


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
