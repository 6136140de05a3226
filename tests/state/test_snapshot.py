"""A snapshot is the state of its step, whatever becomes of the state after."""

from __future__ import annotations

import pytest
import torch

from hvdtrain.state.pieces import StateDict
from hvdtrain.state.snapshot import Snapshot
from hvdtrain.state.tensor_file import _DTYPES
from tests.support.checkpoints import same_state


def _state(seed: int, width: int = 5) -> StateDict:
    torch.manual_seed(seed)
    model = {str(d): torch.randint(0, 2, (width, d.itemsize), dtype=torch.uint8).view(d) for d in _DTYPES.values()}
    model |= {"scalar": torch.tensor(float(seed)), "empty": torch.zeros(0, 3), "turned": torch.randn(3, 4).t()}
    model["parameter"] = torch.nn.Parameter(torch.randn(4, 4))
    return StateDict({"model": model, "optimizer": {}}, {"progress": {"step": seed, "losses": [0.1, float(seed)]}})


def test_a_snapshot_stays_when_the_state_or_its_own_values_change() -> None:
    state, snapshot = _state(1), Snapshot()
    snapshot.capture(state, 7)
    for tensor in state.tensors["model"].values():
        tensor.detach().zero_()
    for values in (state.values, snapshot.state.values):
        values["progress"]["losses"].append(3.0)
    assert same_state(snapshot.state, _state(1))
    assert snapshot.step == 7


def test_the_memory_is_allocated_once_for_each_layout() -> None:
    snapshot, places = Snapshot(), []
    for seed, width in enumerate((5, 5, 5, 0, 9, 3)):
        snapshot.capture(_state(seed, width), seed)
        assert same_state(snapshot.state, _state(seed, width))
        places.append(snapshot.state.tensors["model"]["parameter"].data_ptr())
    assert len(set(places[:3])) == 1


def test_state_that_comes_with_the_first_step() -> None:
    snapshot, state = Snapshot(), _state(1)
    snapshot.capture(state, 0)
    grown = StateDict({**state.tensors, "optimizer": {"w/exp_avg": torch.ones(3)}}, state.values)
    snapshot.capture(grown, 1)
    assert same_state(snapshot.state, grown)
    snapshot.capture(StateDict({"model": {}}, {}), 2)
    assert snapshot.state == StateDict({"model": {}}, {})


def test_a_failed_snapshot_is_not_returned() -> None:
    snapshot = Snapshot()
    snapshot.capture(_state(1), 1)
    with pytest.raises(TypeError):
        snapshot.capture(StateDict({"model": {}}, {"no JSON": {1, 2}}), 2)
    with pytest.raises(AssertionError):
        _ = snapshot.state


class FakeRuntime:
    """CUDA's calls that lock memory: address and bytes of what is locked."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    def check(code: int) -> None:
        if code:
            raise RuntimeError(f"error {code}")

    made = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "check_error", check)
    return made


def test_only_the_bytes_of_the_state_are_locked(runtime: FakeRuntime) -> None:
    snapshot = Snapshot()
    for width in (1000, 3000):
        size = 4 * width + -4 * width % 64
        snapshot._allocate([("model", "w", torch.Size([width]), torch.float32)], pinned=True)
        assert runtime.locked == {snapshot._buffer.data_ptr(): size}, "the former buffer is unlocked"
    del snapshot
    assert not runtime.locked


def test_memory_that_cannot_be_locked_is_an_error(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "cudaHostRegister", lambda *arguments: 2)
    with pytest.raises(RuntimeError, match="error 2"):
        Snapshot()._allocate([("model", "w", torch.Size([8]), torch.float32)], pinned=True)
