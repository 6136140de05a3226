"""What only a CUDA device shows. Skipped without one: ``pytest -m gpu`` on a machine that has one."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import hvdtrain
from hvdtrain.comm.solo import SoloComm
from hvdtrain.engine.base import Engine
from hvdtrain.engine.one_rank import OneRank
from hvdtrain.engine.stages import random_state, set_random_state
from hvdtrain.observe.past_journal import read_steps
from hvdtrain.runtime.host import cores_near, cpu_ranges
from hvdtrain.spans import DEVICE, Spans
from hvdtrain.state.pieces import StateDict
from hvdtrain.state.snapshot import Snapshot
from hvdtrain.training.loop.buffers import Rollback
from hvdtrain.training.loop.forward import Precision
from hvdtrain.training.loop.router_loads import TokenCounter
from hvdtrain.training.loop.shared_buffers import SharedBuffers
from hvdtrain.training.loop.step import Stepper
from hvdtrain.training.loop.update import takes_scale
from hvdtrain.training.records.listeners import ON_DEVICE
from hvdtrain.training.start.device import pick_device
from tests.gpu.test_exchange_cuda import no_waiting
from tests.support.journals import read_journal
from tests.support.launch import train
from tests.support.toy import toy
from tests.support.trace_format import check_trace

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

TOY = Path(__file__).parents[1] / "support" / "toy.py"
TRAIN = {"steps": 8, "global_batch": 8, "micro_batch": 2, "deterministic": True}
OPTIONS = {"train": TRAIN, "checkpoint": {"every": 4}}


def _losses(run: Path) -> list[float]:
    return [line["loss"] for line in read_steps(run / "journal.jsonl").values()]


def _train(folder: Path, **more: object) -> hvdtrain.Result:
    return hvdtrain.train({**OPTIONS, "run_dir": str(folder), **more}, toy)


def test_the_device_is_the_local_ranks() -> None:
    assert pick_device("auto", 0, 1) == torch.device("cuda", 0)


def test_a_rank_is_pinned_to_the_cores_near_its_device(tmp_path: Path) -> None:
    train(f"--task={TOY}:toy", "--train.steps=2", "--run_dir=run", "--parallel.bind=gpu", cwd=tmp_path)
    (started,) = (line for line in read_journal(tmp_path / "run/journal.jsonl") if line.get("event") == "started")
    (group,) = started["binding"]
    near, allowed = cores_near(group["gpus"][0], Path("/sys")), frozenset(os.sched_getaffinity(0))
    if not near & allowed:
        pytest.skip("the kernel lists no core near this device that this process may use")
    assert (group["cores"], group["kept"]) == (cpu_ranges(near & allowed), "")


def test_another_stage_continues_with_the_random_numbers_of_the_device() -> None:
    device = torch.device("cuda", 0)
    state = random_state(device)
    drawn = torch.rand(5, device=device)
    torch.cuda.manual_seed(1)
    set_random_state(state, device)
    assert state.device == device and torch.equal(torch.rand(5, device=device), drawn)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_trains_on_the_device(precision: str, tmp_path: Path) -> None:
    result = _train(tmp_path / "run", precision=precision)
    assert next(result.model.parameters()).is_cuda
    assert result.last_heldout_loss < result.first_heldout_loss


@pytest.mark.parametrize("state_at_once", [False, True])
def test_without_dropout_the_curve_is_the_cpus(state_at_once: bool, tmp_path: Path) -> None:
    """With dropout it is not: CUDA draws other random numbers."""
    losses = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        task = toy(dropout=0.0)
        optimizer = torch.optim.Adagrad(task.model.parameters()) if state_at_once else None
        options = {**OPTIONS, "run_dir": str(tmp_path / device), "parallel": {"device": device}}
        hvdtrain.train(options, replace(task, optimizer=optimizer))
        losses.append(_losses(tmp_path / device))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_law_2_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    _train(tmp_path / "whole")
    _train(tmp_path / "parts", train={**TRAIN, "stop_at": 4})
    _train(tmp_path / "parts")
    assert _losses(tmp_path / "parts") == _losses(tmp_path / "whole")


def test_one_rank_under_mpirun_goes_by_horovod(tmp_path: Path) -> None:
    """A rank a device: with one device, one rank; NCCL's own exchange wants two."""
    train(
        f"--task={TOY}:toy",
        "--train.steps=3",
        f"--run_dir={tmp_path}/run",
        size=torch.cuda.device_count(),
        launcher="mpirun",
        cwd=tmp_path,
    )
    assert len(_losses(tmp_path / "run")) == 3


def test_parts_of_a_step_are_timed_by_the_device_without_a_wait(tmp_path: Path) -> None:
    _train(tmp_path / "run", observe={"nvtx": True, "profile": "3:4"})
    for line in read_steps(tmp_path / "run" / "journal.jsonl").values():
        parts = ("copy_s", "forward_s", "backward_s", "exposed_comm_s", "clip_s")
        assert 0 < sum(line[part] for part in parts) <= line["step_s"] * 1.05  # two clocks
    events = json.loads((tmp_path / "run" / "timeline" / "spans-rank-0.json").read_text())
    check_trace(events)
    on_device = [e for e in events if e["ph"] == "X" and e["tid"] == DEVICE]
    assert {e["name"] for e in on_device} == ON_DEVICE
    assert {e["args"]["step"] for e in on_device} >= set(range(1, 8))
    profile = json.loads((tmp_path / "run" / "timeline" / "torch-steps-3-4-rank-0.json").read_text())
    assert any(e.get("cat") == "kernel" for e in profile["traceEvents"])
    gradients = json.loads((tmp_path / "run" / "timeline" / "gradients.json").read_text())
    assert gradients["device"] == "cuda"
    names = [p["name"] for p in gradients["parameters"]]
    for step in gradients["steps"]:
        ready = dict(zip(names, step["ready_us"], strict=True))
        assert 0 < ready["layers.3.weight"] <= ready["layers.0.weight"] <= step["backward_us"]
        assert ready["idle.weight"] is None


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


def test_tokens_of_experts_are_counted_without_a_wait() -> None:
    chosen = torch.tensor([[0, 3], [3, 9]], device="cuda")
    counter = TokenCounter(4, chosen.device)
    with no_waiting():
        counts = counter.add(counter.zeros(), chosen.flatten())
    assert counts.tolist() == [0, 1, 0, 0, 2, 1]


def test_a_step_waits_for_the_device_only_to_read_its_result() -> None:
    device = torch.device("cuda")
    task = toy(dropout=0.0)
    task.model.to(device)
    optimizer = torch.optim.AdamW(task.model.parameters(), fused=True)
    assert takes_scale(optimizer)
    engine, comm = Engine(optimizer, OneRank(lambda: list(task.model.named_parameters()))), SoloComm()
    parts = [SharedBuffers(task.model, comm), Rollback(task.model)]
    stepper = Stepper(
        task, task.model, engine, comm, Precision("fp32", device), device, 4, 1.0, Spans(), parts, by_device=True
    )
    batch = (torch.ones(4, 6, device=device), torch.ones(4, device=device))
    for context in (nullcontext(), nullcontext(), no_waiting()):  # the host decides on the first step
        with context:
            assert stepper.run([(lambda: None, batch)], 1, []).applied
