"""docs/walkthrough.md as it is, but for the port."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.launch import ENVIRONMENT, ROOT, TIMEOUT_S, program

PAGE = (ROOT / "docs" / "walkthrough.md").read_text()
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
(CLIENT,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
PATH = os.pathsep.join([str(Path(sys.executable).parent), ENVIRONMENT["PATH"]])


def _start(command: str, folder: Path) -> subprocess.Popen[str]:
    words = shlex.split(command)
    environ = {**ENVIRONMENT, "PATH": PATH}
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([program(words[0]), *words[1:]], cwd=folder, env=environ, text=True, **pipes)


def _run(command: str, folder: Path) -> str:
    job = _start(command, folder)
    out, error = job.communicate(timeout=TIMEOUT_S)
    assert job.returncode == 0, f"{command}\n{out[-2000:]}\n{error[-2000:]}"
    return out


def _steps(run: Path) -> dict[int, float]:
    records = map(json.loads, (run / "journal.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records if "loss" in record and "step" in record}


@pytest.mark.slow
def test_the_page(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    pytest.importorskip("openai", reason="openai is not installed")
    from transformers import AutoModelForCausalLM

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 2000)
    train, *others, serve = COMMANDS
    assert "Train on 2 ranks" in PAGE and serve == "hvdtrain serve my-model"
    for command in (train, *others):
        _run(command, tmp_path)
    base, tuned = (_steps(tmp_path / "runs" / name) for name in ("base", "tuned"))
    assert max(tuned.values()) < max(base.values()) and tuned[60] < tuned[1]

    ids = np.random.default_rng(0).integers(0, 256, (3, 21))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "my-model")
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)).logits.numpy()
    session = onnxruntime.InferenceSession(tmp_path / "my-onnx" / "model.onnx")
    assert np.abs(session.run(None, {"input_ids": ids})[0] - expected).max() < 1e-4

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = _start(f"{serve} --port {port}", tmp_path)
    try:
        assert server.stdout is not None and f":{port}/v1" in server.stdout.readline()
        (tmp_path / "client.py").write_text(CLIENT.replace("8000", str(port)))
        answer = _run("python client.py", tmp_path)
        assert len(answer) > 10
        server.send_signal(signal.SIGINT)
        _, error = server.communicate(timeout=TIMEOUT_S)
        assert server.returncode == 0 and not error, error
    finally:
        server.kill()
