"""docs/walkthrough.md as it is, but for a rank that is killed on the way, and for the port."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from tests.support.launch import ENVIRONMENT, ROOT, TIMEOUT_S, program

PAGE = (ROOT / "docs" / "walkthrough.md").read_text()
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
(CLIENT,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
PATH = os.pathsep.join([str(Path(sys.executable).parent), ENVIRONMENT["PATH"]])
KILLED_AT = 80


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
    lines = (run / "journal.jsonl").read_text().splitlines() if (run / "journal.jsonl").exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return {record["step"]: record["loss"] for record in records if "loss" in record and "step" in record}


def _kill_a_rank(job: subprocess.Popen[str], run: Path) -> str:
    """Kill the last rank of a job when it has done `KILLED_AT` steps; what the job says."""
    end = time.monotonic() + TIMEOUT_S
    while len(_steps(run)) < KILLED_AT:
        assert job.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    ranks = [child for child in psutil.Process(job.pid).children(recursive=True) if _is_rank(child)]
    assert len(ranks) == 2
    ranks[-1].kill()
    out, error = job.communicate(timeout=TIMEOUT_S)
    assert job.returncode != 0
    return out + error


def _is_rank(process: psutil.Process) -> bool:
    words = process.cmdline()
    return words[1:3] == ["-m", "hvdtrain"] and "OMPI_COMM_WORLD_RANK" in process.environ()


@pytest.mark.slow
def test_the_page(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    pytest.importorskip("openai", reason="openai is not installed")
    from transformers import AutoModelForCausalLM

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 2000)
    train, *others, serve = COMMANDS
    assert "Train on 2 ranks" in PAGE and serve == "hvdtrain serve my-model"
    base, tuned = tmp_path / "runs" / "base", tmp_path / "runs" / "tuned"
    said = _kill_a_rank(_start(train, tmp_path), base)
    assert "SIGKILL" in said and "resume" in said
    assert "resuming from step" in _run(train, tmp_path)
    assert sorted(_steps(base)) == list(range(1, 201))
    _run(f"{train.replace('runs/base', 'runs/whole')}", tmp_path)
    whole = _steps(tmp_path / "runs" / "whole")
    assert _steps(base) == pytest.approx(whole)
    for command in others:
        _run(command, tmp_path)
    assert max(_steps(tuned).values()) < max(whole.values()) and _steps(tuned)[60] < _steps(tuned)[1]

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
