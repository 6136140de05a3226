"""What a run uses: the energy of all ranks, and operations, counted without a pass more."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hvdtrain
from hvdtrain.config.schema import Config, ObserveConfig, ParallelConfig, TrainConfig
from hvdtrain.observe.energy import CPUS, GPUS
from hvdtrain.observe.monitor import GpuIdentity
from hvdtrain.plan.plan import plan_of
from hvdtrain.task.base import Task
from hvdtrain.training.records import job_facts
from hvdtrain.training.records.job_facts import EVERY_S, EnergyUse, FirstPass, gather_facts
from tests.observe.test_energy import FakeCounter, set_zones
from tests.support.journals import read_events
from tests.support.thread_comm import ThreadComm, on_ranks
from tests.support.thread_job import train_on_threads
from tests.support.toy import toy


@pytest.mark.parametrize("size", [1, 3])
def test_the_energy_of_all_ranks_is_summed(size: int) -> None:
    """Sums with the steps and the rest at the end: each millijoule counts once."""

    def body(comm: ThreadComm) -> tuple[list[dict[str, Any]], int]:
        events: list[dict[str, Any]] = []
        gpu, now_s = FakeCounter(1000 * (comm.rank + 1)), [0.0]
        counters = {GPUS: gpu} if comm.rank else {GPUS: gpu, CPUS: FakeCounter(7000)}
        use = EnergyUse(comm, counters, (GPUS, CPUS), events.append, lambda: now_s[0])
        for step in range(1, 4):
            use.begin_step(step)
            use._meter.read()
            now_s[0] += 0.6 * EVERY_S
            sums = comm.allreduce(torch.tensor(use.values()), name="step").wait().tolist()
            use.on_sums(step, sums)
        use.finish()
        use.close()
        return events, gpu.readings - 1

    ranks = on_ranks(size, body)
    events, readings = ranks[0]
    assert readings == 4
    assert [event["at_step"] for event in events] == [2, 3]
    assert events[-1]["joules"] == {"GPUs": readings * sum(range(1, size + 1)), "CPUs": readings * 7}
    assert not any(others for others, _ in ranks[1:])


def test_a_counter_that_fails_on_one_rank_leaves_no_sum() -> None:
    def body(comm: ThreadComm) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        use = EnergyUse(comm, {GPUS: FakeCounter(5, fails_at=2 if comm.rank == 1 else 99)}, (GPUS,), events.append)
        use.finish()
        return events

    assert on_ranks(2, body)[0][-1] | {"event": ""} == {"event": "", "at_step": 0, "joules": {}, "failed": ["GPUs"]}


def test_one_rank_of_a_host_reads_its_processors(tmp_path: Path) -> None:
    set_zones(tmp_path, package_0=5000)
    for name in ("proc/sys/kernel/random/boot_id", "proc/self/ns/time"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("same")
    found = on_ranks(3, lambda comm: gather_facts(comm, torch.device("cpu"), tmp_path))
    assert [list(counters) for _, counters in found] == [[CPUS], [], []]
    (record, _), _, (last, _) = found
    assert record == last and (record["devices"], record["energy"]) == (3, {CPUS: ""})
    assert record["versions"]["torch"] == torch.__version__
    assert record["machine"]["busiest_host"]["ranks"] == 3


def test_ranks_that_share_a_gpu_are_one_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Four ranks on two GPUs: two devices, and each GPU is read once."""

    def body(comm: ThreadComm) -> Any:
        monkeypatch.setattr(job_facts, "gpu_identity", lambda device: GpuIdentity(0, f"gpu {comm.rank // 2}", ""))
        monkeypatch.setattr(job_facts, "GpuCounter", lambda gpu: FakeCounter(1))
        monkeypatch.setattr(job_facts, "clock_id", lambda root: "one host")
        monkeypatch.setattr(job_facts, "_device_name", lambda *given: "H")
        return gather_facts(comm, torch.device("cpu"), tmp_path)

    found = on_ranks(4, body)
    assert [GPUS in counters for _, counters in found] == [True, False, True, False]
    record, _ = found[0]
    assert (record["devices"], record["machine"]["devices"]) == (2, {"H": 2})
    assert record["energy"] == {GPUS: "", CPUS: "no RAPL counters"}


@pytest.mark.parametrize("size", [1, 2])
def test_a_run_with_a_price_ends_with_its_cost(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_facts, "CpuCounter", lambda root: FakeCounter(3_600_000))
    options = ("--train.steps=5", "--observe.tensorboard=false", "--observe.price_per_hour=1000")
    task = f"--task={Path(toy.__code__.co_filename)}:toy"
    results = train_on_threads(task, *options, f"--run_dir={tmp_path}", size=size)
    assert {result.cost for result in results} == {results[0].cost}
    assert results[0].cost.startswith("money ") and "kWh (CPUs)" in results[0].cost
    last = read_events(tmp_path, "energy")[-1]
    assert last["at_step"] == 5 and last["joules"]["CPUs"] >= 3600


CPU = torch.device("cpu")
FORWARD = 2 * (6 * 16 + 16 * 1)
"""Of the toy's two layers, for one sample."""


def _told(task: Task, size: int = 1, passes: int = 2, **options: Any) -> list[dict[str, Any]]:
    config = Config(train=TrainConfig(micro_batch=4), **options)
    told: list[dict[str, Any]] = []
    around = FirstPass(config, CPU, size, told.append, plan_of(config).dimensions.same_samples)
    x = torch.ones(4, 6)
    for _ in range(passes):
        with around.around_forward(x) or nullcontext():
            task.loss(task.model, (x, x.sum(1)))
    return told


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"per_sample": 3 * FORWARD, "device": "cpu", "peak_per_s": None, "peak_source": None}),
        # Ranks with the same samples share a pass.
        ({"size": 8, "parallel": ParallelConfig(tp=2, cp=2, ep=8)}, {"per_sample": 4 * 3 * FORWARD}),
        # The peak that the user gives is one device's.
        ({"size": 4, "observe": ObserveConfig(peak_tflops=2.5)}, {"peak_per_s": 10e12}),
    ],
    ids=["one", "same samples", "peak"],
)
def test_training_counts_three_times_a_forward_pass_and_is_reported_once(
    options: dict[str, Any], expected: dict[str, Any]
) -> None:
    (found,) = _told(toy(), **options)
    assert expected.items() <= found.items()


def test_the_first_pass_of_training_is_counted_and_no_pass_more_is_run(tmp_path: Path) -> None:
    """Not that of an evaluation; and the task is not made again."""
    calls: list[str] = []

    def build() -> Task:
        calls.append("made")
        base = toy(heldout=2)

        def loss(model: nn.Module, batch: Any) -> Any:
            calls.append("trained" if torch.is_grad_enabled() else "evaluated")
            return base.loss(model, batch)

        return replace(base, loss=loss)

    hvdtrain.train({"train": {"steps": 2, "global_batch": 4, "micro_batch": 2}, "run_dir": str(tmp_path)}, build)
    assert calls == ["made", "evaluated", *["trained"] * 4, "evaluated"]
    (found,) = read_events(tmp_path, "flops")
    assert found["per_sample"] == 3 * FORWARD


def test_a_model_without_products_has_no_figure() -> None:
    assert _told(replace(toy(), loss=lambda model, batch: (batch[0].sum(), 1.0))) == []
