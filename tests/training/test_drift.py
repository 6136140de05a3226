"""Parameters that drift apart are found on the way, by all ranks at once, and named."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvdtrain import Task
from hvdtrain.errors import DriftError
from hvdtrain.observe.past_journal import read_steps
from hvdtrain.state.divided import OnStages
from hvdtrain.state.train_state import Progress, TrainState
from hvdtrain.training.diagnostics.drift import _BITS, Drift, digests, replicated, tensors_hash
from hvdtrain.training.loop.shared_buffers import SharedBuffers
from hvdtrain.training.loop.step_sums import CombinedSums
from tests.support.thread_comm import ThreadComm, on_ranks
from tests.support.thread_job import train_on_threads


def _model() -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 2))
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def _state() -> TrainState:
    model = _model()
    return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), None, Progress(), None)


def _sums(comm: ThreadComm, numbers: list[int]) -> list[int]:
    """As the trainer sums them: in float64."""
    totals = torch.tensor(numbers, dtype=torch.float64)
    return [int(total) for total in comm.allreduce(totals, name="step/totals").wait().tolist()]


def _watch(state: TrainState, comm: Any, every: int) -> Drift:
    return Drift(state, comm, every, lambda found: None, pytest.fail)


def _steps(comm: ThreadComm, drifting: int, every: int, at: int) -> tuple[int, str]:
    """Steps until drift is found, and what is said of it; rank `drifting` goes its own way at step `at`."""
    state, warnings = _state(), list[str]()
    model = state.model
    drift = CombinedSums(Drift(state, comm, every, SharedBuffers(model, comm).share, warnings.append))
    for step in range(1, 13):
        if step == at and comm.rank == drifting:
            model[1].weight.data[0, 7] = torch.nextafter(model[1].weight.data[0, 7], torch.tensor(9.0))
        sums = _sums(comm, drift.values())
        state.progress = Progress(step=step)  # another object, as where a run goes back to a commit
        try:
            drift.on_sums(step, sums)
        except DriftError as error:
            return step, str(error)
    assert not warnings
    return 0, ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float64])
@pytest.mark.parametrize("numel", [0, 1, 40, 10_000])
def test_a_slice_of_a_flat_buffer_has_the_hash_of_its_copy(dtype: torch.dtype, numel: int) -> None:
    flat = torch.randint(-99, 99, (numel + 8,)).to(dtype)
    parts = [flat[start : start + numel] for start in range(9)]
    assert digests(parts).tolist() == digests(part.clone() for part in parts).tolist()


@pytest.mark.parametrize(("size", "drifting", "names"), [(2, 0, "1"), (2, 1, "1"), (4, 0, "1, 2, 3"), (4, 3, "3")])
def test_every_rank_finds_it_at_the_same_step_and_names_parameter_and_ranks(
    size: int, drifting: int, names: str
) -> None:
    found = on_ranks(size, lambda comm: _steps(comm, drifting, every=4, at=6))
    assert {step for step, _ in found} == {9}, "looked at before step 9: after 8 are done"
    assert all(f"1.weight differs on rank(s) {names}" in text for _, text in found)


@pytest.mark.parametrize(("every", "at"), [(4, 99), (0, 6)], ids=["equal", "not asked for"])
def test_nothing_is_found(every: int, at: int) -> None:
    assert on_ranks(3, lambda comm: _steps(comm, 1, every, at)) == [(0, "")] * 3


@pytest.mark.parametrize("divided", [True, False])
def test_a_model_that_ranks_divide_is_compared_after_its_first_step(divided: bool) -> None:
    """Pairs of ranks have the same part."""

    def body(comm: ThreadComm) -> list[tuple[int, list[bool]]]:
        state = _state()
        if divided:
            held = OnStages((2, 2), (comm.rank // 2,), ((0, 1), (2, 3))).of(torch.ones(2, 2))
            state.model.register_parameter("part", held)
        watch = _watch(state, comm, 100)
        found = []
        for step in (1, 2, 100):
            state.progress = Progress(step=step)
            found.append((step, [bool(number) for number in watch.values()]))
        return found

    for rank, found in enumerate(on_ranks(4, body)):
        own = [True, True, *([n // 2 == rank // 2 for n in range(4)] if divided else [])]
        none = [False] * len(own)
        assert found == [(1, own if divided else none), (2, none), (100, own)]


@pytest.mark.parametrize("wrong", [None, 0, 2])
def test_what_the_first_and_the_last_stage_have_is_compared(wrong: int | None) -> None:
    def body(comm: ThreadComm) -> None:
        state = _state()
        value = torch.full((2 if comm.rank != 1 else 0, 2), 2.0 if comm.rank == wrong else 1.0)
        state.model.register_parameter("part", OnStages((2, 2), (0, 2), ((0,), (1,), (2,))).of(value))
        watch = _watch(state, comm, 1)
        watch.on_sums(1, _sums(comm, watch.values()))

    if wrong is None:
        on_ranks(3, body)
    else:
        with pytest.raises(DriftError, match="part"):
            on_ranks(3, body)


def test_drift_that_disappeared_is_reported_and_the_run_continues() -> None:
    def body(comm: ThreadComm) -> list[str]:
        warnings = list[str]()
        state = _state()
        drift = Drift(state, comm, 1, SharedBuffers(state.model, comm).share, warnings.append)
        drift.on_sums(5, [3, 5])
        return warnings

    for warnings in on_ranks(2, body):
        assert len(warnings) == 1 and "before step 5" in warnings[0]


def test_a_number_has_few_bits_and_depends_on_each_of_the_parameters() -> None:
    """A digest sees the change of a bit, and a swap."""
    model = _model()
    found, before = {tensors_hash(replicated(model))}, digests(model.parameters())
    for number, parameter in enumerate(model.parameters()):
        for place in (0, -1):
            parameter.data.view(-1).view(torch.int32)[place] ^= 1
            found.add(tensors_hash(replicated(model)))
            changed, before = digests(model.parameters()) != before, digests(model.parameters())
            assert changed.nonzero().tolist() == [[number]]
    assert len(found) == 1 + 2 * 4
    assert all(0 <= one < 1 << _BITS for one in found)
    weight = model[0].weight.data
    weight[3, 4], weight[4, 3] = weight[4, 3].clone(), weight[3, 4].clone()
    assert (digests(model.parameters()) != before).nonzero().tolist() == [[0]]


def test_a_digest_sees_each_bit() -> None:
    assert tensors_hash({}) == 0, "ranks that divide all parameters have no copies"
    tensor = torch.arange(2050, dtype=torch.float32)
    before, bits = digests([tensor]), tensor.view(torch.int32)
    for place in (*range(16), 2047, 2048, 2049):
        for bit in range(32):
            bits[place] ^= 1 << bit if bit < 31 else -(1 << 31)
            assert digests([tensor]) != before, (place, bit)
            bits[place] ^= 1 << bit if bit < 31 else -(1 << 31)


def test_replicated_tensors_are_parameters_and_persistent_buffers() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.register_buffer("cache", torch.zeros(1), persistent=False)
    model.register_buffer("empty", None)
    expected = ["0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert list(replicated(model)) == expected


def test_each_of_several_gets_its_own_sums() -> None:
    got: list[list[int]] = []

    def member(*numbers: int) -> Any:
        return SimpleNamespace(values=lambda: [*numbers], on_sums=lambda step, sums: got.append([step, *sums]))

    several = CombinedSums(member(1, 2), member(), member(3))
    several.on_sums(7, [10 * n for n in several.values()])
    assert got == [[7, 10, 20], [7], [7, 30]]


def test_a_run_ends_long_before_its_next_checkpoint(tmp_path: Path) -> None:
    def build(rank: int) -> Task:
        passes = count(1)

        def loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
            if next(passes) == 8 and rank == 1:
                model[1].bias.data += 1e-3  # type: ignore[index]
            return (model(batch[0]) ** 2).sum(), len(batch[0])

        model = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1))
        return Task(model, loss, torch.utils.data.TensorDataset(torch.ones(64, 1)))

    options = ("--train.steps=40", "--checkpoint.every=40", "--train.check_every=4", f"--run_dir={tmp_path}")
    with pytest.raises(DriftError, match=r"1\.bias differs on rank\(s\) 1"):
        train_on_threads(*options, "--train.global_batch=4", "--train.micro_batch=2", size=2, build=build)
    assert 8 <= max(read_steps(tmp_path / "journal.jsonl")) <= 13
