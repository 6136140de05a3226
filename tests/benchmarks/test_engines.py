"""benchmarks/engines.py leaves out what is not there and divides the right steps; its peers train the same as DDP."""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.launch import ROOT, TIMEOUT_S

sys.path.insert(0, str(ROOT / "benchmarks"))
engines: Any = importlib.import_module("engines")
peer_packages: Any = importlib.import_module("peer_packages")

STEPS = 3
SHARDED = [peer for peer in engines.PEERS if peer not in ("no_exchange", "ddp") and peer_packages.is_installed(peer)]


def test_each_of_ours_trains_with_its_options() -> None:
    assert engines.contenders(engines.OURS) == list(engines.OURS)
    assert engines.kind("zero2")[0] == "ours" and engines.kind("fsdp2")[0] == "engine_loops:fsdp2"
    assert engines.kind("fsdp")[0] == "ours" and engines.kind("fsdp_gloo")[0] == "ours_by_torch"
    assert engines.kind("zero2")[1].ours["parallel.shard"] == "gradients"
    assert engines.nested({"a.b": 1, "a.c": 2, "d": 3}) == {"a": {"b": 1, "c": 2}, "d": 3}


def test_what_is_missing_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BENCHMARK_PEERS", str(tmp_path))
    monkeypatch.setattr(engines, "OURS", {"later": {"parallel.later": "x"}})
    assert engines.contenders(["later", "ddp", "deepspeed_zero2"]) == ["ddp"]
    said = capsys.readouterr().err
    assert "later is left out: " in said and "deepspeed is not installed" in said
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").touch()
    assert engines.contenders(["deepspeed_zero2"]) == ["deepspeed_zero2"]


def test_ratios_are_of_one_round() -> None:
    seconds = {"zero2": [1.0, 2.0, 3.0], "ddp_zero": [2.0, 4.0, 12.0], "no_exchange": [1.0, 1.0, 1.0]}
    found = {f.name: f for f in engines.figures(seconds, "engines")}
    assert (found["engines/zero2_over_ddp_zero"].value, found["engines/zero2_over_ddp_zero"].low) == (0.5, 0.25)
    assert found["engines/zero2_over_no_exchange"].value == 2.0 and found["engines/zero2_ms"].value == 2000.0
    assert set(found) == {
        *("engines/zero2_over_ddp_zero", "engines/zero2_over_no_exchange", "engines/ddp_zero_over_no_exchange"),
        *("engines/zero2_ms", "engines/ddp_zero_ms", "engines/no_exchange_ms"),
    }


def test_every_ratio_is_of_known_contenders() -> None:
    assert {name for pair in engines.PAIRS.values() for name in pair} <= {*engines.OURS, *engines.PEERS}
    assert {*engines.BETWEEN_HOSTS, *engines.QUICK} <= {*engines.OURS, *engines.PEERS}


def test_a_step_is_the_time_between_two_ends() -> None:
    turns = iter([[{"time": 5.0, "step_s": 0.1}], [{"time": t, "step_s": 0.1} for t in (7.0, 9.0, 12.0)]])
    assert engines.step_s(SimpleNamespace(turn=lambda seconds: next(turns))) == 2.5  # the first turn was too short


def test_a_loss_that_does_not_fall_ends_the_benchmark() -> None:
    def job(*losses: float) -> Any:
        return SimpleNamespace(steps=lambda: [{"loss": loss} for loss in losses])

    assert engines.losses({"a": job(3.0, 2.0, 1.0, 0.0), "b": job(3.0, 2.0, 1.0)}) == {"a": 1.5, "b": 1.5}
    with pytest.raises(SystemExit, match="does not fall: b"):
        engines.losses({"a": job(3.0, 2.0, 1.0), "b": job(3.0, 3.0, 3.0)})


def _train(peer: str, folder: Path) -> list[dict[str, torch.Tensor]]:
    """Return the parameters of each rank after `STEPS` steps of SGD that are all clipped."""
    optimizer = {"name": "sgd", "lr": 0.5, "momentum": 0.5, "weight_decay": 0.0}
    setting = {"model": "llama15m", "micro_batch": 1, "arguments": {"seq_len": 8}, "optimizer": optimizer, "clip": 0.1}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    file = folder / peer
    script = str(ROOT / "benchmarks" / "engine_loops.py")
    command = [sys.executable, script, peer, json.dumps(setting), str(file), str(STEPS)]
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **group, "RANK": str(rank), "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            output, _ = rank.communicate(timeout=TIMEOUT_S)
            assert rank.returncode == 0, output
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    steps = [json.loads(line) for line in file.read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3]
    return [load_file(f"{file}.{rank}.safetensors") for rank in range(2)]


@pytest.fixture(scope="module")
def by_ddp(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    return _train("ddp", tmp_path_factory.mktemp("ddp"))


@pytest.mark.slow
@pytest.mark.parametrize("peer", SHARDED)
def test_a_peer_trains_the_same_as_ddp(peer: str, by_ddp: list[dict[str, torch.Tensor]], tmp_path: Path) -> None:
    first, second = _train(peer, tmp_path)
    for name, expected in by_ddp[0].items():
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=0)
        torch.testing.assert_close(first[name], expected, rtol=0, atol=2e-7)
