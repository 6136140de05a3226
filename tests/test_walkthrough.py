"""docs/walkthrough.md as it is."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.launch import ENVIRONMENT, ROOT, TIMEOUT_S, program

PAGE = (ROOT / "docs" / "walkthrough.md").read_text()
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
PATH = os.pathsep.join([str(Path(sys.executable).parent), ENVIRONMENT["PATH"]])


def _run(command: str, folder: Path) -> None:
    words = shlex.split(command)
    job = subprocess.run(
        [program(words[0]), *words[1:]],
        cwd=folder,
        env={**ENVIRONMENT, "PATH": PATH},
        text=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=TIMEOUT_S,
    )
    assert job.returncode == 0, f"{command}\n{job.stdout[-2000:]}\n{job.stderr[-2000:]}"


def _steps(run: Path) -> dict[int, float]:
    records = map(json.loads, (run / "journal.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records if "loss" in record and "step" in record}


@pytest.mark.slow
def test_the_page(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    from transformers import AutoModelForCausalLM

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 2000)
    assert "Train on 2 ranks" in PAGE
    for command in COMMANDS:
        _run(command, tmp_path)
    base, tuned = (_steps(tmp_path / "runs" / name) for name in ("base", "tuned"))
    assert max(tuned.values()) < max(base.values()) and tuned[60] < tuned[1]

    ids = np.random.default_rng(0).integers(0, 256, (3, 21))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "my-model")
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)).logits.numpy()
    session = onnxruntime.InferenceSession(tmp_path / "my-onnx" / "model.onnx")
    assert np.abs(session.run(None, {"input_ids": ids})[0] - expected).max() < 1e-4
