"""Each kind of memory is counted once; a limit, and advice about what lowers it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hvdtrain.comm.solo import SoloComm
from hvdtrain.config.schema import Config, MemoryConfig, ParallelConfig
from hvdtrain.engine.make import make_engine
from hvdtrain.plan.plan import Plan
from hvdtrain.spans import Spans
from hvdtrain.training.diagnostics.failure_report import _memory_of
from hvdtrain.training.records.memory import (
    failing_module,
    largest_parameters,
    memory_advice,
    memory_by_kind,
    unused_memory,
)
from tests.support.thread_comm import ThreadComm, on_ranks

_MIB = 1 << 20
_CPU, _GPU = torch.device("cpu"), torch.device("cuda", 0)


def _held(comm: ThreadComm) -> dict[str, float]:
    model = nn.Linear(512, 512 * 4, bias=False)  # 4 MiB
    model.register_buffer("mask", torch.zeros(_MIB, dtype=torch.uint8))
    optimizer = torch.optim.AdamW(model.parameters())
    engine = make_engine(optimizer, model, comm, Plan(), Spans())
    engine.begin(1)
    engine.backward(model(torch.ones(1, 512)).sum())
    engine.finish()
    engine.step()
    found = memory_by_kind(_CPU, model, engine)
    assert found["where"] == "host"
    return found["mib"]  # type: ignore[no-any-return]


def test_each_kind_of_memory_is_counted_once() -> None:
    for mib in on_ranks(2, _held):
        known = {name: value for name, value in mib.items() if "rest" not in name}
        # Gradients are views of the buckets.
        assert known == {"parameters": 4.0, "buffers": 1.0, "exchange": 4.0, "gradients": 0.0, "optimizer": 8.0}
    (alone,) = on_ranks(1, _held)
    assert (alone["exchange"], alone["gradients"]) == (0.0, 4.0)


class _Greedy(nn.Module):
    passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        if self.passes == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x * x


@pytest.mark.parametrize("recomputed", [False, True])
def test_the_module_that_asked_for_more_is_named(recomputed: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Identity(), _Greedy()))
    given = torch.ones(1, 2, requires_grad=True)
    with pytest.raises(torch.OutOfMemoryError) as failed:
        if recomputed:
            checkpoint(model, given, use_reentrant=False).sum().backward()
        model(model(given))
    assert failing_module(failed.value, model) == "1.1"
    assert failing_module(ValueError("not raised"), model) == ""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """GPU 1 of two: 10 GiB, of which 2 GiB are free; torch has two segments of 1 GiB on it."""
    states = ("inactive", "active_allocated", "active_awaiting_free", "inactive")
    blocks = [{"size": size * _MIB, "state": state} for size, state in zip((100, 400, 24, 500), states, strict=True)]
    whole = {"device": 0, "total_size": 9 << 30, "blocks": [{"size": 9 << 30, "state": "inactive"}]}
    cut = {"device": 1, "total_size": 1 << 30, "blocks": blocks}
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [whole, cut, cut])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 << 30, 10 << 30))
    return torch.device("cuda", 1)


@pytest.mark.parametrize("has_failed", [False, True])
def test_memory_that_no_tensor_uses_is_in_the_report_unless_the_device_has_failed(
    gpu: torch.device, has_failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(device: torch.device) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access")

    if has_failed:
        monkeypatch.setattr(torch.cuda, "mem_get_info", fail)
    model = nn.Linear(2, 2)
    engine = make_engine(torch.optim.SGD(model.parameters()), model, SoloComm(), Plan(), Spans())
    worker = SimpleNamespace(device=gpu, state=SimpleNamespace(model=model))
    current: Any = SimpleNamespace(run=SimpleNamespace(config=Config()), worker=worker, engine=engine, comm=SoloComm())
    current.rounds = SimpleNamespace(elastic=False)
    found = _memory_of(current, MemoryError())
    assert found.get("unused") == (None if has_failed else {"free": 1200.0, "largest": 500.0, "outside": 6 * 1024.0})
    assert unused_memory(_CPU) == {}
    assert found["largest"].keys() == {"weight", "bias"} and found["micro_batch"] == 2


def test_the_largest_parameters_are_named() -> None:
    model = nn.Sequential(*(nn.Linear(1, size << 18, bias=False) for size in (1, 4, 2, 3)))
    assert list(largest_parameters(model).items()) == [("1.weight", 4.0), ("3.weight", 3.0), ("2.weight", 2.0)]


BLOCKS = nn.Sequential(nn.Linear(1, 1))
CHECKPOINTING, OFFLOAD = "--memory.checkpointing", "--memory.offload"
SHARD, FSDP = "--parallel.shard", "--parallel.engine"


@pytest.mark.parametrize(
    ("size", "device", "parallel", "memory", "elastic", "expected"),
    [
        (2, _GPU, {}, {}, False, [CHECKPOINTING, SHARD, FSDP]),
        (1, _GPU, {}, {"checkpointing": "selective"}, False, [CHECKPOINTING]),
        (2, _GPU, {}, {"checkpointing": "full"}, True, [SHARD]),
        (2, _GPU, {"shard": "gradients"}, {}, True, [CHECKPOINTING, OFFLOAD]),
        (2, _CPU, {"shard": "gradients"}, {}, True, [CHECKPOINTING]),
        (2, _GPU, {"compression": "powersgd:4"}, {}, False, [CHECKPOINTING]),
        (2, _GPU, {"engine": "fsdp"}, {}, False, [CHECKPOINTING, OFFLOAD]),
        (2, _GPU, {"engine": "fsdp", "compression": "int8"}, {}, False, [CHECKPOINTING]),
        (2, _GPU, {"engine": "fsdp"}, {"offload": "optimizer", "checkpointing": "full"}, False, []),
        (2, _GPU, {"engine": "ddp"}, {}, False, [CHECKPOINTING, FSDP]),
    ],
)
def test_advice_is_what_the_engine_supports_and_does_not_use(
    size: int, device: torch.device, parallel: Any, memory: Any, elastic: bool, expected: list[str]
) -> None:
    config = replace(Config(), parallel=ParallelConfig(**parallel), memory=MemoryConfig(**memory))
    found = memory_advice(config, BLOCKS, device, size, elastic=elastic)
    assert [line.partition(" ")[0] for line in found] == expected
    without = memory_advice(config, BLOCKS[0], device, size, elastic=elastic)
    assert [line.partition(" ")[0] for line in without] == [x for x in expected if x not in (CHECKPOINTING, FSDP)]
