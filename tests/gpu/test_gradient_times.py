"""When gradients are ready on a CUDA device, by its own clock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import hvdtrain
from tests.support.toy import toy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_gradients_come_one_after_another_inside_of_backward(tmp_path: Path) -> None:
    hvdtrain.train({"run_dir": str(tmp_path), "train": {"steps": 10, "global_batch": 8, "micro_batch": 4}}, toy)
    found = json.loads((tmp_path / "timeline" / "gradients.json").read_text())
    assert found["device"] == "cuda"
    names = [p["name"] for p in found["parameters"]]
    for step in found["steps"]:
        ready = dict(zip(names, step["ready_us"], strict=True))
        assert 0 < ready["layers.3.weight"] <= ready["layers.0.weight"] <= step["backward_us"]
        assert ready["idle.weight"] is None
