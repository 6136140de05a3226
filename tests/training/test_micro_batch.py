"""The micro-batch that fits all ranks is found together, and the search leaves no trace."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hvdtrain.comm.solo import SoloComm
from hvdtrain.config.schema import Config, MemoryConfig, ParallelConfig, TrainConfig
from hvdtrain.errors import ConfigError
from hvdtrain.plan.plan import plan_of
from hvdtrain.training.records.memory import memory_advice
from hvdtrain.training.start import device as devices
from hvdtrain.training.start import micro_batch
from hvdtrain.training.start.micro_batch import check_auto, find_largest, sizes_to_try
from hvdtrain.training.start.opening import unequal_shares
from tests.support.gallery import Recorded
from tests.support.stack import STACK, stack
from tests.support.thread_comm import ThreadComm, on_ranks
from tests.support.thread_job import Period, train_in_rounds

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
AUTO = replace(Config(), train=TrainConfig(micro_batch="auto"))


@pytest.mark.parametrize(
    ("global_batch", "ranks", "sizes"),
    [(16, 1, [1, 2, 4, 8, 16]), (16, 2, [1, 2, 4, 8]), (24, 2, [1, 2, 4]), (10, 2, [1, 2]), (3, 4, [1])],
)
def test_sizes_divide_the_work_evenly(global_batch: int, ranks: int, sizes: list[int]) -> None:
    """Micro-batches of 8 would give one of two ranks 16 of 24 samples."""
    assert sizes_to_try(global_batch, ranks) == sizes


@pytest.mark.parametrize("dimension", ["tp", "ep", "cp"])
def test_ranks_that_need_each_other_in_a_pass_predict(dimension: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 ranks, 2 share samples, but for experts."""
    plan = plan_of(replace(AUTO, parallel=ParallelConfig(**{dimension: 2})))
    run = SimpleNamespace(config=replace(AUTO, train=replace(AUTO.train, global_batch=16)))
    comm, recorder = SimpleNamespace(rank=0, size=4), SimpleNamespace(say=lambda _: None)
    current: Any = SimpleNamespace(
        run=run, comm=comm, worker=SimpleNamespace(plan=plan), layout=None, recorder=recorder
    )
    monkeypatch.setattr(micro_batch, "on_rank_0", lambda *_, **__: [])
    asked: list[int] = []
    monkeypatch.setattr(micro_batch, "predict_largest", lambda current, most: (asked.append(most) or 2, []))
    assert micro_batch._search(current) == (2, []) and asked == [4 if dimension == "ep" else 8]


def _limited(limit: int, tried: list[int]) -> Callable[[int], None]:
    def run(samples: int) -> None:
        tried.append(samples)
        if samples > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    return run


@pytest.mark.parametrize(
    ("limits", "found", "lacking"), [([8, 2, 4], 2, [1]), ([9, 9, 9], 8, []), ([0, 8, 0], 0, [0, 2])]
)
def test_a_rank_with_less_memory_decides(limits: list[int], found: int, lacking: list[int]) -> None:
    def body(comm: ThreadComm) -> tuple[Any, list[int]]:
        tried: list[int] = []
        return find_largest(comm, [1, 2, 4, 8], _limited(limits[comm.rank], tried)), tried

    results = on_ranks(3, body)
    assert all(result == ((found, lacking), results[0][1]) for result in results)


def test_another_error_ends_the_search() -> None:
    with pytest.raises(ZeroDivisionError):
        find_largest(SoloComm(), [1], lambda samples: 1 // 0)


@pytest.fixture(autouse=True)
def _collects_no_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be that of all tests before."""
    monkeypatch.setattr(micro_batch, "gc", SimpleNamespace(collect=lambda: None))


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Samples that fit, by rank, on devices that pretend to have a limit."""
    found: dict[int, int] = {}
    real = micro_batch.try_pass

    def run(current: Any, samples: int) -> None:
        real(current, samples)
        _limited(found[current.comm.rank], [])(samples)

    monkeypatch.setattr(micro_batch, "try_pass", run)
    monkeypatch.setattr("hvdtrain.training.session.check_auto", lambda *_, **__: None)
    return found


Trains = Callable[..., Recorded]
OPTIONS = (*STACK, "--statistics=true", "--train.micro_batch=auto")


def test_training_is_that_with_the_size_that_was_found(limits: dict[int, int], trained: Trains) -> None:
    """To the bit, with dropout and running statistics; a resume with more memory keeps the size."""
    plain = trained("plain", *OPTIONS, "--train.micro_batch=2", size=2)
    limits.update({0: 4, 1: 2})
    trained("found", *OPTIONS, "--train.stop_at=3", size=2)
    limits.update({0: 8, 1: 8})
    found = trained("found", *OPTIONS, size=2)
    assert [(e["samples"], e["limited_by"]) for e in found.events("micro_batch_found")] == [(2, [1]), (2, [])]
    assert found.losses() == plain.losses() and len(plain.losses()) == 6
    assert [e["loss"] for e in found.events("evaluation")][-1] == plain.events("evaluation")[-1]["loss"]
    for group, tensors in plain.state().tensors.items():
        assert all(torch.equal(found.state().tensors[group][name], tensor) for name, tensor in tensors.items())


def test_later_rounds_keep_the_size_of_the_first(
    limits: dict[int, int], trained: Trains, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only its two ranks search. The round after next has none of the first one's: a rank that joined has the size."""
    plain = trained("plain", *STACK, "--train.micro_batch=2", "--dropout=0", size=2)
    limits.update({0: 4, 1: 2})
    searches: list[Any] = []
    search = micro_batch._search
    monkeypatch.setattr(micro_batch, "_search", lambda current: searches.append(current) or search(current))
    plan = [Period((0, 1), 2), Period((1, 2), 2), Period((2, 3))]
    options = (*STACK, "--train.micro_batch=auto", f"--run_dir={tmp_path / 'run'}")
    train_in_rounds(*options, plan=plan, build=lambda: stack(dropout=0.0))
    found = Recorded(tmp_path, 0, "", "")
    assert [event["samples"] for event in found.events("micro_batch_found")] == [2, 2, 2]
    assert found.losses() == pytest.approx(plain.losses()) and len(searches) == 2


def test_too_little_memory_for_one_sample_names_options(limits: dict[int, int], trained: Trains) -> None:
    limits.update({0: 1, 1: 0})
    with pytest.raises(ConfigError, match=r"rank\(s\) 1 lack memory") as caught:
        trained("one", *OPTIONS, size=2)
    assert "--memory.checkpointing full" in str(caught.value) and "--parallel.shard gradients" in str(caught.value)


def test_a_search_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    worker = SimpleNamespace(state=SimpleNamespace(model=model), device=CPU, compiled=0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]
    current: Any = SimpleNamespace(worker=worker)
    with pytest.raises(torch.OutOfMemoryError), micro_batch._without_trace(current):
        model(torch.randn(4, 3)).sum().backward()
        random.random(), np.random.rand()
        raise torch.OutOfMemoryError
    assert [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()] == states
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_memory_of_a_host_is_not_searched() -> None:
    check_auto(replace(AUTO, train=TrainConfig(micro_batch=4)), CPU)
    check_auto(AUTO, GPU)
    with pytest.raises(ConfigError, match="on a CPU"):
        check_auto(AUTO, CPU)


@pytest.mark.parametrize(
    ("size", "elastic", "options", "memory", "count"),
    [
        (1, False, {}, {}, 2.0),
        (1, True, {}, {}, 3.0),
        (4, False, {}, {}, 3.0),
        (4, False, {"compression": "int8"}, {}, 4.0),
        (4, False, {"shard": "gradients"}, {}, 1.5),
        (4, False, {"shard": "gradients"}, {"offload": "optimizer"}, 1.0),
    ],
)
def test_a_trial_leaves_room_for_optimizer_and_exchange(
    size: int, elastic: bool, options: Any, memory: Any, count: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a multiple of the trained parameters, and 5% of the GPU. In an elastic job, others may join one rank."""
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(5, 5).requires_grad_(False))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=2000))
    config = replace(AUTO, parallel=ParallelConfig(**options), memory=MemoryConfig(**memory))
    worker = SimpleNamespace(device=GPU, state=SimpleNamespace(model=model), plan=plan_of(config))
    run, comm = SimpleNamespace(config=config), SimpleNamespace(size=size)
    current: Any = SimpleNamespace(worker=worker, run=run, comm=comm, rounds=SimpleNamespace(elastic=elastic))
    assert micro_batch._reserve_bytes(current) == count * 400 + 100


BLOCKS = nn.Sequential(nn.Linear(1, 1))
CHECKPOINTING, OFFLOAD = "--memory.checkpointing", "--memory.offload"
SHARD, FSDP = "--parallel.shard", "--parallel.engine"


@pytest.mark.parametrize(
    ("size", "device", "parallel", "memory", "elastic", "expected"),
    [
        (2, GPU, {}, {}, False, [CHECKPOINTING, SHARD, FSDP]),
        (1, GPU, {}, {"checkpointing": "selective"}, False, [CHECKPOINTING]),
        (2, GPU, {}, {"checkpointing": "full"}, True, [SHARD]),
        (2, GPU, {"shard": "gradients"}, {}, True, [CHECKPOINTING, OFFLOAD]),
        (2, CPU, {"shard": "gradients"}, {}, True, [CHECKPOINTING]),
        (2, GPU, {"compression": "powersgd:4"}, {}, False, [CHECKPOINTING]),
        (2, GPU, {"engine": "fsdp"}, {}, False, [CHECKPOINTING, OFFLOAD]),
        (2, GPU, {"engine": "fsdp", "compression": "int8"}, {}, False, [CHECKPOINTING]),
        (2, GPU, {"engine": "fsdp"}, {"offload": "optimizer", "checkpointing": "full"}, False, []),
        (2, GPU, {"engine": "ddp"}, {}, False, [CHECKPOINTING, FSDP]),
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


def test_a_limit_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=8 << 30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: called.append(given))
    for gib in (None, 2.0, 99.0):
        devices.limit_memory(GPU, gib)
    assert called == [(0.25, GPU), (1.0, GPU)]
    with pytest.raises(ConfigError, match="trains on a CPU"):
        devices.limit_memory(CPU, 2.0)


@pytest.mark.parametrize(
    ("batch", "micro", "ranks", "words"),
    [
        (16, 4, 4, []),
        (16, 4, 1, []),
        (Config().train.global_batch, Config().train.pass_samples, 8, []),
        (16, 4, 8, ["4 of 8 ranks are idle", "50%", "--train.global_batch 32", "--train.micro_batch 2"]),
        (16, 4, 3, ["1 of 3 ranks have 2", "the others 1", "33%", "--train.global_batch 12", "--train.micro_batch 3"]),
        (4, 1, 3, ["1 of 3 ranks have 2", "33%", "--train.global_batch 3"]),
        (2, 1, 8, ["6 of 8 ranks are idle", "75%", "--train.global_batch 8"]),
    ],
)
def test_unequal_shares_are_said_with_what_divides(batch: int, micro: int, ranks: int, words: list[str]) -> None:
    found = unequal_shares(batch, micro, ranks)
    assert bool(found) == bool(words) and all(word in found for word in words)
    assert ("--train.micro_batch" in found) == any("micro_batch" in word for word in words)
    for option, value in re.findall(r"--train\.(\w+) (\d+)", found):
        sizes = {"global_batch": batch, "micro_batch": micro, option: int(value)}
        assert -(-sizes["global_batch"] // sizes["micro_batch"]) % ranks == 0
