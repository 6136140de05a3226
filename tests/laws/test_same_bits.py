"""`--train.reproducible bits`: the same bits on any number of ranks, however they divide the optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from hvdtrain import Task
from hvdtrain.errors import ConfigError, LaunchError, TaskError
from tests.laws.test_divided_rounds import PLANS, train_divided
from tests.laws.test_laws import check_same, record
from tests.laws.test_workers import task_builder
from tests.support.gallery import LANGUAGE, Gallery, Recorded
from tests.support.stack import STACK, stack
from tests.support.thread_job import Period

BITS = "--train.reproducible=bits"
RAGGED = (*STACK, BITS, "--train.global_batch=11", "--method=momentum", "--dropout=0")
"""Six micro-batches of two samples, the last one of one: tied weights, LayerNorm, parameters of some batches only.

Threads share random numbers: where a forward pass waits for others, only real jobs can have dropout.
"""
One = Callable[..., Recorded]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> One:
    """The training of some options on one rank."""
    return cache(lambda *options: record(tmp_path_factory.mktemp("one"), *options))


def _same(found: Recorded, expected: Recorded) -> None:
    """Losses, held-out losses, and each bit of the state but the plan of buckets."""
    assert found.losses() == expected.losses()
    held_out = [[event["loss"] for event in job.events("evaluation")] for job in (found, expected)]
    assert held_out[0][-1] == held_out[1][-1]
    norms = [[line["grad_norm"] for line in job.journal if "grad_norm" in line] for job in (found, expected)]
    assert norms[0] == norms[1] or len(norms[0]) > len(norms[1])  # steps that were repeated are there twice
    check_same(found.state(), expected.state(), exchange=None)


@pytest.mark.parametrize(
    ("shard", "size"),
    [
        *(("none", size) for size in (2, 3, 4, 5, 8)),
        *((each, size) for each in ("optimizer", "gradients") for size in (2, 3, 4)),
    ],
)
@pytest.mark.some(4)
def test_law_12_any_number_of_ranks_has_the_bits_of_one(shard: str, size: int, one: One, tmp_path: Path) -> None:
    options = (*RAGGED, "--dropout=0.1") if shard == "none" else RAGGED
    _same(record(tmp_path, *options, f"--parallel.shard={shard}", size=size), one(*options))


@pytest.mark.parametrize("option", ["--train.reproducible=none", "--train.micro_batch=1"])
def test_law_12_is_not_trivial(option: str, one: One, tmp_path: Path) -> None:
    """Without it, or with other micro-batches, bits differ."""
    other = record(tmp_path, *RAGGED, option, size=5)
    weight = "layers.0.inner.weight"
    assert not torch.equal(*(job.state().tensors["model"][weight] for job in (other, one(*RAGGED))))


@pytest.mark.parametrize(
    "options",
    [
        (*RAGGED, "--checkpoints=true", "--precision=bf16"),
        (*RAGGED, "--again=true", "--train.ema=0.9"),
        (*RAGGED, "--precision=fp16"),
        (*RAGGED, "--precision=bf16-weights"),
        (*LANGUAGE, BITS, "--optimizer.name=muon"),
        (*LANGUAGE, BITS, "--optimizer.name=adafactor", "--optimizer.schedule=wsd"),
        (*LANGUAGE, BITS, "--optimizer.name=adamw", "--memory.checkpointing=full"),
        (*LANGUAGE, BITS, "--optimizer.name=sgd", "--optimizer.schedule=linear", "--memory.offload=optimizer"),
    ],
    ids=" ".join,
)
@pytest.mark.some(3)
def test_law_12_holds_for_optimizers_schedules_and_formats(options: tuple[str, ...], one: One, tmp_path: Path) -> None:
    on_one = tuple(option for option in options if "offload" not in option)
    _same(record(tmp_path, *options, "--parallel.shard=optimizer", size=3), one(*on_one))


def test_law_12_holds_where_a_run_resumes_with_other_ranks(one: One, tmp_path: Path) -> None:
    for size, shard, stop in ((2, "none", 2), (1, "none", 3), (3, "gradients", 4), (4, "optimizer", 5), (5, "none", 6)):
        resized = record(tmp_path, *RAGGED, f"--parallel.shard={shard}", f"--train.stop_at={stop}", size=size)
    _same(resized, one(*RAGGED))


@pytest.mark.parametrize(
    ("shard", "name"),
    [("gradients", "each rank in turn, to one"), ("none", "ranks that are not neighbours"),
     ("optimizer", "ranks leave, neighbours too, and join")],
)  # fmt: skip
def test_law_12_holds_where_ranks_are_killed_and_join(shard: str, name: str, tmp_path: Path) -> None:
    """A matrix is divided by rows, at elements that do not fill a CPU's vectors."""
    build = _wide()
    alone = train_divided(tmp_path / "one", Period((0,)), shard="none", build=build, more=(BITS,))
    _same(train_divided(tmp_path / "rounds", *PLANS[name], shard=shard, build=build, more=(BITS,)), alone)


@pytest.mark.slow
@pytest.mark.parametrize(("job", "name"), [("two", "bits"), ("four", "bits"), ("two", "bits_again")])
def test_law_12_holds_for_fsdp(job: str, name: str, gallery: Gallery, one: One) -> None:
    options = ("--again=true",) if name == "bits_again" else ()
    found = Recorded(gallery["fsdp"].folder / job / name, 0, "", "")
    _same(found, one(*RAGGED, "--dropout=0.1", *options))


def _wide(width: int = 301) -> Callable[[], Task]:
    torch.manual_seed(3)
    inner = (nn.Linear(6, width), nn.LayerNorm(width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
    model, given = nn.Sequential(*inner, nn.Linear(width, 1)), task_builder()()

    def build() -> Task:
        own = copy.deepcopy(model)
        return replace(given, model=own, optimizer=torch.optim.AdamW(own.parameters(), lr=1e-3))

    return build


def test_what_cannot_keep_bits_is_refused(tmp_path: Path) -> None:
    """Models, optimizers and threads; what options say is in tests/plan/."""
    fused = task_builder("AdamW")()
    fused.optimizer.param_groups[0]["fused"] = True  # type: ignore[union-attr]
    for task, error, message in (
        (stack(statistics=True), ConfigError, "does not support batch norm, which norm has"),
        (fused, TaskError, "AdamW\\(fused=True\\)"),
        (_writing(), TaskError, "writes the buffer seen of _Writing"),
    ):
        with pytest.raises(error, match=message):
            record(tmp_path / message[:9], BITS, "--train.steps=1", build=lambda rank, task=task: task)


class _Writing(nn.Linear):
    """Counts its passes."""

    def __init__(self) -> None:
        super().__init__(6, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return super().forward(given)


def _writing() -> Task:
    return Task(_Writing(), lambda model, batch: (model(batch[0]).sum(), len(batch[0])), task_builder()().train_data)


def test_the_number_of_threads_is_that_of_the_first_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hvdtrain.training.start import device

    assert record(tmp_path, *RAGGED, "--train.stop_at=2").state().values["progress"]["threads"] == 1
    monkeypatch.setattr(device, "without_our_variables", lambda variables: {"OMP_NUM_THREADS": "3"})
    with pytest.raises(LaunchError, match="rank 0 was started with OMP_NUM_THREADS=3") as caught:
        record(tmp_path, *RAGGED, "--train.stop_at=4", size=2)
    assert "OMP_NUM_THREADS=1, as since the first start" in str(caught.value)
