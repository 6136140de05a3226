"""Parameters that drift apart are found on the way, by all ranks at once, and named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from hvdtrain.comm.solo import SoloComm
from hvdtrain.errors import DriftError
from hvdtrain.observe.past_journal import read_steps
from hvdtrain.state.divided import OnStages
from hvdtrain.state.train_state import Progress, TrainState
from hvdtrain.training.diagnostics import drift
from hvdtrain.training.diagnostics.drift import _BITS, Drift, digests, replicated, tensors_hash
from hvdtrain.training.loop.shared_buffers import SharedBuffers
from hvdtrain.training.loop.step_sums import CombinedSums
from tests.support.launch import train
from tests.support.thread_comm import ThreadComm, on_ranks


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


@pytest.mark.parametrize(("size", "drifting"), [(2, 0), (2, 1), (3, 1), (4, 3)])
def test_every_rank_finds_it_at_the_same_step_and_names_parameter_and_ranks(size: int, drifting: int) -> None:
    found = on_ranks(size, lambda comm: _steps(comm, drifting, every=4, at=6))
    assert {step for step, _ in found} == {9}, "looked at before step 9: after 8 are done"
    names = "1, 2, 3" if drifting == 0 and size == 4 else "1" if drifting == 0 else str(drifting)
    assert all(f"1.weight differs on rank(s) {names}" in text for _, text in found)


@pytest.mark.parametrize(("every", "at"), [(4, 99), (0, 6)], ids=["equal", "not asked for"])
def test_nothing_is_found(every: int, at: int) -> None:
    assert on_ranks(3, lambda comm: _steps(comm, 1, every, at)) == [(0, "")] * 3


def test_one_rank_compares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A digest takes some operations on each parameter."""
    monkeypatch.setattr(drift, "digests", lambda tensors: pytest.fail("digested"))
    model = nn.Linear(2, 2)
    state = TrainState(model, torch.optim.SGD(model.parameters()), torch.amp.GradScaler(enabled=False), Progress())
    watch = Drift(state, SoloComm(), 1, lambda found: None, pytest.fail)
    assert watch.values() == [0, 0]
    watch.on_sums(0, [0, 0])
    assert drift.check_equal(model, SoloComm(), name="drift") == {}


@pytest.mark.parametrize("divided", [True, False])
def test_a_model_that_ranks_divide_is_compared_after_its_first_step(divided: bool) -> None:
    """Pairs of ranks have the same part."""

    def body(comm: ThreadComm) -> list[tuple[int, list[bool]]]:
        state = _state()
        if divided:
            held = OnStages((2, 2), (comm.rank // 2,), ((0, 1), (2, 3))).of(torch.ones(2, 2))
            state.model.register_parameter("part", held)
        watch = Drift(state, comm, 100, lambda found: None, pytest.fail)
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
        watch = Drift(state, comm, 1, lambda found: None, pytest.fail)
        sums = comm.allreduce(torch.tensor(watch.values(), dtype=torch.float64), name="sums").wait()
        watch.on_sums(1, [int(number) for number in sums])

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
    model = _model()
    found = {tensors_hash(replicated(model))}
    for parameter in model.parameters():
        for place in (0, -1):
            parameter.data.view(-1).view(torch.int32)[place] ^= 1
            found.add(tensors_hash(replicated(model)))
    assert len(found) == 1 + 2 * 4
    assert all(0 <= one < 1 << _BITS for one in found)


def test_each_of_several_gets_its_own_sums() -> None:
    class Member:
        def __init__(self, numbers: list[int]) -> None:
            self.numbers, self.got = numbers, list[int]()

        def values(self) -> list[int]:
            return self.numbers

        def on_sums(self, step: int, sums: object) -> None:
            self.got = [step, *sums]  # type: ignore[misc]

    members = [Member([1, 2]), Member([]), Member([3])]
    several = CombinedSums(*members)
    several.on_sums(7, [10 * n for n in several.values()])
    assert [member.got for member in members] == [[7, 10, 20], [7], [7, 30]]


TASK = """
import os
import torch
from hvdtrain import Task

def build():
    model = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.Linear(2, 1))
    count = [0]
    def loss(model, batch):
        count[0] += 1
        if count[0] == 8 and os.environ["OMPI_COMM_WORLD_RANK"] == "1":
            model[1].bias.data += 1e-3
        return (model(batch[0]) ** 2).sum(), len(batch[0])
    return Task(model, loss, torch.utils.data.TensorDataset(torch.ones(64, 1)))
"""


@pytest.mark.slow
def test_a_real_run_ends_long_before_its_next_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "drifting.py").write_text(TASK)
    options = ["--train.steps=40", "--checkpoint.every=40", "--train.check_every=4", "--run_dir=run"]
    batch = ["--train.global_batch=4", "--train.micro_batch=2"]
    done = train("--task=drifting.py:build", *options, *batch, size=2, cwd=tmp_path, check=False)
    assert done.returncode != 0
    assert "1.bias differs on rank(s) 1" in done.stdout + done.stderr
    assert 8 <= max(read_steps(tmp_path / "run/journal.jsonl")) <= 13
