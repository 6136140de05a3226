"""A snapshot of GPU tensors: the state of its step, although kernels that change it are queued right after."""

from __future__ import annotations

import pytest
import torch

from hvdtrain.state.pieces import StateDict
from hvdtrain.state.snapshot import Snapshot

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_kernels_queued_later_do_not_change_a_snapshot() -> None:
    tensors = {"w": torch.zeros(64 << 20, device="cuda"), "step": torch.tensor(0.0), "turned": torch.zeros(3, 2).t()}
    snapshot = Snapshot()
    for step in range(5):
        snapshot.capture(StateDict({"model": tensors}, {"step": step}), step)
        for tensor in tensors.values():
            tensor.add_(1)
        found = snapshot.state
        assert found.tensors["model"]["w"].is_pinned()
        assert all(bool((tensor == step).all()) for tensor in found.tensors["model"].values())
        assert found.values == {"step": step}
