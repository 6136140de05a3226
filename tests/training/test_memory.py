"""Each kind of memory is counted once; and the micro-batch that is predicted to fit all ranks of FSDP."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hvdtrain.comm import torch_group
from hvdtrain.comm.imagined import imagined_ranks
from hvdtrain.comm.solo import SoloComm
from hvdtrain.config.parse import RunConfig, parse_argv
from hvdtrain.config.schema import Config, MemoryConfig
from hvdtrain.engine.make import make_engine
from hvdtrain.errors import ConfigError
from hvdtrain.fit.memory import predict_memory
from hvdtrain.plan.plan import Plan, plan_of
from hvdtrain.programs import Finished
from hvdtrain.spans import Spans
from hvdtrain.training.diagnostics.failure_report import _memory_of
from hvdtrain.training.records.memory import failing_module, largest_parameters, memory_by_kind, unused_memory
from hvdtrain.training.start import micro_batch as finding
from hvdtrain.training.start.micro_batch import predict_largest, use_found_micro_batch
from tests.support.stack import STACK, stack
from tests.support.thread_comm import ThreadComm, on_ranks

_MIB = 1 << 20
_CPU = torch.device("cpu")


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


def _parsed(micro_batch: str) -> RunConfig:
    options = ("--parallel.engine=fsdp", "--train.global_batch=16", f"--train.micro_batch={micro_batch}")
    return parse_argv([*STACK, *options], stack)


def _of_rank(comm: Any, tmp_path: Path, run: Any) -> Any:
    device = SimpleNamespace(type="cpu", index=comm.rank)
    plan, info = plan_of(run.config), SimpleNamespace(folder=Path.cwd())
    worker = SimpleNamespace(device=device, micro_batch=0, info=info, plan=plan)
    recorder = SimpleNamespace(event=lambda record: None, say=lambda text: None)
    layout = SimpleNamespace(journal=tmp_path / "journal.jsonl")
    return SimpleNamespace(comm=comm, worker=worker, run=run, layout=layout, recorder=recorder)


@pytest.mark.slow
def test_the_rank_with_the_least_memory_decides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch_group, "_lasting", {})
    with imagined_ranks(2):
        needed = {size: predict_memory(_parsed(str(size)), stack, 2).peak for size in (4, 8)}
    usable = [needed[8], needed[8] - 1]
    assert needed[4] < usable[1]
    monkeypatch.setattr(finding, "_usable_bytes", lambda device, limit: usable[device.index])

    def body(comm: ThreadComm) -> Any:
        current = _of_rank(comm, tmp_path, _parsed("auto"))
        use_found_micro_batch(current)
        return current.run.config.train.micro_batch, current.worker.micro_batch

    assert on_ranks(2, body) == [(4, 4)] * 2
    assert not torch.distributed.is_initialized()


def _answers(code: int, line: str, error: str = "") -> Any:
    return lambda *given, **named: Finished(code, line, error)


@pytest.mark.parametrize(
    ("answer", "most", "expected"),
    [
        (_answers(0, '[{"memory": {}, "micro_batch": 8}]'), 16, (8, [1])),
        (_answers(0, '[{"memory": {}, "micro_batch": 8}]'), 4, (4, [])),
        (_answers(1, '[{"memory": {}, "micro_batch": 1}]'), 16, (0, [1])),
        (_answers(1, '[{"memory": null, "refused": "steps depend on values"}]'), 16, "steps depend on values"),
        (_answers(2, "", "a warning\nhvdtrain: TaskError: no function"), 16, "TaskError: no function"),
    ],
)
def test_answers_of_a_prediction(
    answer: Any, most: int, expected: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(finding, "run_program", answer)
    monkeypatch.setattr(finding, "_usable_bytes", lambda device, limit: 2 - device.index)

    def body(comm: ThreadComm) -> tuple[int, list[int]]:
        return predict_largest(_of_rank(comm, tmp_path, SimpleNamespace(config=Config(), resolved={})), most)

    if isinstance(expected, tuple):
        assert on_ranks(2, body) == [expected] * 2
    else:
        with pytest.raises(ConfigError, match=expected):
            on_ranks(2, body)


@pytest.mark.parametrize(("limit", "gib"), [(None, 0.9 * 9), (4.0, 0.9 * 4), (99.0, 0.9 * 9)])
def test_what_torch_and_others_hold_is_not_usable(
    limit: float | None, gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 << 30, 16 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 << 30)
    device, memory = torch.device("cuda", 0), MemoryConfig(limit=limit)
    assert finding._usable_bytes(device, memory.limit) == int(gib * 2**30)
