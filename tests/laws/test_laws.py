"""Laws 1 to 4 on real jobs: the command line, under mpirun, with dropout, random samples and uneven weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hvdtrain.observe.journal import read_steps
from hvdtrain.state.store import CheckpointStore
from hvdtrain.state.train_state import StateDict
from tests.support.launch import train

TOY = [f"--task={Path(__file__).parents[1]}/support/toy.py:toy", "--train.global_batch=9", "--train.micro_batch=2"]
TINY = ["--model.preset=tiny", "--train.global_batch=8", "--train.micro_batch=2", "--train.eval_samples=8"]
IMAGE = ["--task=image", "--train.global_batch=9", "--train.micro_batch=2", "--train.eval_samples=8"]
TASKS = {
    "toy": [*TOY, "--train.steps=12"],
    "language_model": [*TINY, "--train.steps=8"],
    "image": [*IMAGE, "--train.steps=12"],
}


def _losses(run: Path) -> list[float]:
    steps = read_steps(run / "journal.jsonl")
    assert sorted(steps) == list(range(1, len(steps) + 1))
    return [steps[step]["loss"] for step in sorted(steps)]


def _state(run: Path) -> StateDict:
    found = CheckpointStore(run / "checkpoints", pytest.fail).load_newest()
    assert found is not None
    return found[1]


def _train(run: Path, task: str, *options: str, size: int = 1) -> None:
    train(*TASKS[task], f"--run_dir={run}", *options, size=size, cwd=run.parent)


@pytest.mark.parametrize("task", ["toy", "language_model", pytest.param("image", marks=pytest.mark.slow)])
def test_law_1_the_loss_curve_does_not_depend_on_the_number_of_ranks(task: str, tmp_path: Path) -> None:
    """loss(1) == loss(2) == loss(2 -> 1 -> 3): to float tolerance, the same samples, dropout included."""
    for size in (1, 2):
        _train(tmp_path / str(size), task, size=size)
    for size, stop in ((2, 3), (1, 6), (3, 12)):
        _train(tmp_path / "resized", task, f"--train.stop_at={stop}", size=size)
    one = _losses(tmp_path / "1")
    for other in (_losses(tmp_path / "2"), _losses(tmp_path / "resized")):
        assert other == pytest.approx(one, rel=2e-6)
    assert one[-1] != one[0]
    positions = [_state(tmp_path / name).values["progress"]["position"] for name in ("1", "2", "resized")]
    assert positions == [positions[0]] * 3


@pytest.mark.parametrize(
    ("task", "size"),
    [
        ("toy", 1),
        pytest.param("toy", 2, marks=pytest.mark.slow),
        pytest.param("language_model", 1, marks=pytest.mark.slow),
        ("language_model", 2),
    ],
)
def test_law_2_resumed_equals_uninterrupted_bit_for_bit(task: str, size: int, tmp_path: Path) -> None:
    _train(tmp_path / "whole", task, size=size)
    for stop in (4, 12):
        _train(tmp_path / "parts", task, f"--train.stop_at={stop}", size=size)
    assert _losses(tmp_path / "parts") == _losses(tmp_path / "whole")
    whole, parts = _state(tmp_path / "whole"), _state(tmp_path / "parts")
    assert parts.values == whole.values
    for group, tensors in whole.tensors.items():
        assert tensors.keys() == parts.tensors[group].keys()
        assert all(torch.equal(tensors[name], parts.tensors[group][name]) for name in tensors)


@pytest.mark.parametrize("compression", [pytest.param("int8", marks=pytest.mark.slow), "powersgd:2"])
def test_law_2_holds_with_compression_where_both_save(compression: str, tmp_path: Path) -> None:
    """A save evens out over the ranks what they carry on: so it does in the run that was not interrupted."""
    options = [f"--parallel.compression={compression}", "--checkpoint.every=4"]
    _train(tmp_path / "whole", "toy", *options, size=2)
    for stop in (4, 12):
        _train(tmp_path / "parts", "toy", f"--train.stop_at={stop}", *options, size=2)
    assert _losses(tmp_path / "parts") == _losses(tmp_path / "whole")
    whole, parts = _state(tmp_path / "whole"), _state(tmp_path / "parts")
    assert parts.values == whole.values
    assert "exchange" in whole.tensors
    for group, tensors in whole.tensors.items():
        assert tensors.keys() == parts.tensors[group].keys()
        assert all(torch.equal(tensors[name], parts.tensors[group][name]) for name in tensors)


@pytest.mark.slow
def test_compression_goes_on_with_any_number_of_ranks(tmp_path: Path) -> None:
    _train(tmp_path / "plain", "toy")
    for size, stop in ((2, 3), (1, 6), (3, 12)):
        _train(tmp_path / "int8", "toy", f"--train.stop_at={stop}", "--parallel.compression=int8", size=size)
    plain, coded = _losses(tmp_path / "plain"), _losses(tmp_path / "int8")
    assert coded != plain
    assert coded == pytest.approx(plain, rel=1e-2)


def test_law_1_holds_under_bf16_and_with_workers(tmp_path: Path) -> None:
    for size in (1, 2):
        _train(tmp_path / str(size), "toy", "--precision=bf16", "--loader.workers=1", size=size)
    assert _losses(tmp_path / "2") == pytest.approx(_losses(tmp_path / "1"), rel=2e-3)


@pytest.mark.slow
def test_law_1_is_not_trivial(tmp_path: Path) -> None:
    """Another seed, and another micro-batch (which is what dropout is seeded by), give another curve."""
    _train(tmp_path / "a", "toy")
    for name, option in (("b", "--seed=1"), ("c", "--train.micro_batch=3")):
        _train(tmp_path / name, "toy", option)
        assert _losses(tmp_path / name) != pytest.approx(_losses(tmp_path / "a"), rel=1e-3)
