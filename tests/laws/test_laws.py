"""Laws 1 to 4, with dropout, random samples and uneven weights: at 1 to 8 ranks as threads, and on real jobs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hvdtrain import Task
from hvdtrain.errors import DriftError
from hvdtrain.state.pieces import StateDict
from hvdtrain.verify.data import verify_data
from tests.support.chaos import TASK
from tests.support.gallery import IMAGE, LANGUAGE, STEPS, TOY, Gallery, Recorded
from tests.support.scenario import LENGTH
from tests.support.thread_job import train_on_threads

SHORT = (*TOY, "--train.steps=12", "--checkpoint.every=0")
SIZES = (1, 2, 3, 5, 8)
UNOBSERVED = ("--observe.timeline=off", "--observe.tensorboard=false")
"""What takes as long as a short training, and changes no curve."""


def record(folder: Path, *options: str, size: int = 1, build: Callable[[int], Task] | None = None) -> Recorded:
    """Train on threads, in `run` of a folder."""
    folder.mkdir(exist_ok=True)
    train_on_threads(*UNOBSERVED, *options, f"--run_dir={folder / 'run'}", size=size, build=build)
    return Recorded(folder, 0, "", "")


def check_same(one: StateDict, other: StateDict, **values: object) -> None:
    """Bit for bit; `values` replaces some of the values of both."""
    assert {**one.values, **values} == {**other.values, **values}
    assert one.tensors.keys() == other.tensors.keys()
    for group, tensors in one.tensors.items():
        assert tensors.keys() == other.tensors[group].keys()
        assert all(torch.equal(tensors[name], other.tensors[group][name]) for name in tensors)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Recorded]:
    """The toy, uninterrupted, by number of ranks."""
    folder = tmp_path_factory.mktemp("whole")
    return {size: record(folder / str(size), *SHORT, size=size) for size in SIZES}


@pytest.mark.parametrize("size", SIZES[1:])
def test_law_1_the_loss_curve_does_not_depend_on_the_number_of_ranks(size: int, whole: dict[int, Recorded]) -> None:
    """Nor does what was used of the data: to float tolerance, the same samples."""
    one = whole[1].losses()
    assert whole[size].losses() == pytest.approx(one, rel=2e-6)
    assert one[-1] != one[0]
    position = whole[size].state().values["progress"]["position"]
    assert position == whole[1].state().values["progress"]["position"]


def test_laws_1_and_4_hold_where_the_number_of_ranks_changes(whole: dict[int, Recorded], tmp_path: Path) -> None:
    for size, stop in ((2, 3), (1, 4), (3, 6), (8, 7), (5, 12)):
        resized = record(tmp_path, *SHORT, f"--train.stop_at={stop}", size=size)
    assert resized.losses() == pytest.approx(whole[1].losses(), rel=2e-6)
    assert not verify_data(resized.run).wrong


@pytest.mark.parametrize("options", [LANGUAGE, IMAGE], ids=["language", "image"])
def test_law_1_holds_for_the_tasks_that_come_with_it(options: tuple[str, ...], tmp_path: Path) -> None:
    one, two = (record(tmp_path / str(size), *options, size=size).losses() for size in (1, 2))
    assert two == pytest.approx(one, rel=2e-6)


def test_laws_1_and_2_hold_for_an_optimizer_of_whole_matrices(tmp_path: Path) -> None:
    """The model has a mixture of experts. Others are in test_choices.py."""
    options = (*LANGUAGE, "--optimizer.name=muon")
    one, two, three = (record(tmp_path / str(size), *options, size=size) for size in (1, 2, 3))
    assert two.losses() == pytest.approx(one.losses(), rel=5e-6)
    assert three.losses() == pytest.approx(one.losses(), rel=5e-6)
    for stop in (3, 8):
        parts = record(tmp_path / "parts", *options, f"--train.stop_at={stop}", size=2)
    assert parts.losses() == two.losses() and two.losses()[-1] < two.losses()[0]
    check_same(parts.state(), two.state())


@pytest.mark.parametrize("option", ["--seed=1", "--train.micro_batch=3"])
def test_law_1_is_not_trivial(option: str, whole: dict[int, Recorded], tmp_path: Path) -> None:
    """Another seed, and another micro-batch (which is what dropout is seeded by), give another curve."""
    assert record(tmp_path, *SHORT, option).losses() != pytest.approx(whole[1].losses(), rel=1e-3)


@pytest.mark.parametrize("size", SIZES)
def test_law_2_resumed_equals_uninterrupted_bit_for_bit(size: int, whole: dict[int, Recorded], tmp_path: Path) -> None:
    for stop in (4, 12):
        parts = record(tmp_path, *SHORT, f"--train.stop_at={stop}", size=size)
    assert parts.losses() == whole[size].losses()
    check_same(parts.state(), whole[size].state())


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("compression", ["fp16", "int8", "powersgd:2", "topk:0.1"])
@pytest.mark.some(3)
def test_law_2_holds_with_compression_where_both_save(compression: str, size: int, tmp_path: Path) -> None:
    """A save evens out over the ranks what they carry on: so it does in the run that was not interrupted."""
    options = [*SHORT, f"--parallel.compression={compression}", "--checkpoint.every=4"]
    one = record(tmp_path / "whole", *options, size=size)
    for stop in (4, 12):
        parts = record(tmp_path / "parts", *options, f"--train.stop_at={stop}", size=size)
    assert parts.losses() == one.losses()
    assert "exchange" in one.state().tensors or compression == "fp16"
    check_same(parts.state(), one.state())


def test_law_3_parameters_that_drift_apart_end_the_job(tmp_path: Path) -> None:
    def drifting(rank: int) -> Task:
        def loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
            if rank == 1:
                model.bias.data += 1e-6  # type: ignore[operator]
            return model(batch[0]).sum(), 1

        return Task(nn.Linear(1, 1), loss, torch.utils.data.TensorDataset(torch.ones(8, 1)))

    with pytest.raises(DriftError, match=r"bias differs on rank\(s\) 1"):
        train_on_threads(*SHORT[1:], f"--run_dir={tmp_path}", size=3, build=drifting)


@pytest.mark.parametrize("size", SIZES)
def test_law_4_every_sample_of_an_epoch_is_used_once(size: int, whole: dict[int, Recorded]) -> None:
    report = verify_data(whole[size].run)
    assert not report.wrong and report.end == 9 * 12  # more than two epochs of 50


# On real jobs.

_SLOW = ("signalled", "torchrun", "engines", "three", "gloo")
SIGNALLED, TORCHRUN, ENGINES, THREE, GLOO = (pytest.param(name, marks=pytest.mark.slow) for name in _SLOW)


@pytest.mark.parametrize("name", ["two", THREE, GLOO, "resumed", "killed", TORCHRUN, ENGINES])
def test_law_1_on_a_real_job(name: str, gallery: Gallery) -> None:
    job, one = gallery[name], gallery["one"].losses()
    assert job.code == 0 and len(one) == STEPS
    assert job.losses() == pytest.approx(one, rel=2e-6)


@pytest.mark.parametrize("name", ["two", TORCHRUN, ENGINES])
def test_parameters_equal_those_of_one_rank(name: str, gallery: Gallery) -> None:
    """And their averages, after all steps: also by DDP, and where one engine resumes a checkpoint of another."""
    for group in ("model", "callbacks"):
        found, expected = (gallery[job].state().tensors[group] for job in (name, "one"))
        assert found.keys() == expected.keys()
        for parameter, value in expected.items():
            torch.testing.assert_close(found[parameter], value, rtol=1e-5, atol=1e-6, msg=parameter)


@pytest.mark.parametrize(
    ("name", "options"), [pytest.param("image", IMAGE, marks=pytest.mark.slow), ("language", LANGUAGE)]
)
def test_law_1_on_a_real_job_of_a_task_that_comes_with_it(
    name: str, options: tuple[str, ...], gallery: Gallery, tmp_path: Path
) -> None:
    assert gallery[name].losses() == pytest.approx(record(tmp_path, *options).losses(), rel=2e-6)


def test_law_2_on_a_real_job(gallery: Gallery) -> None:
    """Two ranks, resumed, against two that were not interrupted."""
    assert gallery["resumed"].losses() == gallery["two"].losses()
    check_same(gallery["resumed"].state(), gallery["two"].state())


@pytest.mark.parametrize("name", ["one", "two", THREE, "resumed", "killed", "survived", SIGNALLED, TORCHRUN])
def test_law_4_on_a_real_job(name: str, gallery: Gallery) -> None:
    assert not verify_data(gallery[name].run).wrong


def test_a_killed_rank_is_survived(gallery: Gallery, tmp_path: Path) -> None:
    """Laws 1 and 4 in an elastic job: a rank is killed, the other continues, and a new one joins."""
    job = gallery["survived"]
    assert job.notes["sizes"] == [2, 1, 2]
    assert "Timed out" not in job.out + job.err, "what waits for a dead rank fails as soon as it dies"
    assert job.losses() == pytest.approx(record(tmp_path, *TASK, LENGTH).losses(), rel=1e-5)
