"""Steps of a run with the same bits, once more on one rank; and the step at which two such runs part."""

from __future__ import annotations

import shutil
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hvdtrain import Task
from hvdtrain.cli.replay import main
from hvdtrain.errors import ConfigError
from hvdtrain.training.diagnostics.drift import MOST_PASSES, pass_hashes
from hvdtrain.verify.replay import find_difference
from tests.laws.test_laws import UNOBSERVED, record
from tests.support.stack import STACK
from tests.support.thread_job import train_on_threads

BITS = (*STACK, "--train.reproducible=bits", "--train.global_batch=11", "--method=momentum", "--checkpoint.every=2")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("recorded"), *BITS, "--dropout=0.1", size=3).run


def _with_other_loss(run: Path, folder: Path) -> Path:
    """A copy of a run in which the loss of step 4 has another last digit."""
    other = shutil.copytree(run, folder / "other")
    journal = other / "journal.jsonl"
    lines = journal.read_text().splitlines()
    number = next(n for n, line in enumerate(lines) if line.startswith('{"step":4,'))
    head, _, tail = lines[number].partition('"loss":')
    value, comma, rest = tail.partition(",")
    lines[number] = f'{head}"loss":{float(value) * (1 + 2**-50)!r}{comma}{rest}'
    journal.write_text("\n".join(lines) + "\n")
    return other


def test_two_runs_part_where_a_bit_differs(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), str(run)]) == 0
    assert "steps 1 to 6 have the same bits" in capsys.readouterr().out
    assert main([str(run), str(_with_other_loss(run, tmp_path))]) == 1
    out = capsys.readouterr().out
    assert "steps 1 to 3 have the same bits" in out and "step 4 differs: loss" in out and "equal: a sample" in out
    clipped = record(tmp_path / "clipped", *BITS, "--dropout=0.1", "--train.clip=0.01", size=2).run
    assert main([str(run), str(clipped)]) == 1
    out = capsys.readouterr().out
    assert "step 2 differs" in out and "train.clip" in out and "size 3 and 2" in out


def _train(folder: Path, *options: str, size: int, bad_sample: int = -1, bad_pass: int = -1) -> Path:
    """Train in six micro-batches a step; a sample is another one, or the sign of an element of a gradient of a pass."""

    def build(rank: int) -> Task:
        torch.manual_seed(3)
        model, data, passes = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)), torch.randn(60, 6), count()
        data[bad_sample] *= 1 if bad_sample < 0 else -1

        def changed(gradient: Tensor) -> Tensor:
            sign = -1.0 if next(passes) == bad_pass else 1.0
            return torch.cat([gradient[:, :1] * sign, gradient[:, 1:]], 1)

        model[2].weight.register_hook(changed)

        def loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
            return (model(batch[0])[:, 0] - batch[0].sum(1)).square().sum(), len(batch[0])

        dataset = torch.utils.data.TensorDataset(data)
        return Task(model, loss, dataset, dataset, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))

    given = (*UNOBSERVED, "--train.reproducible=bits", "--train.global_batch=12", "--train.micro_batch=2")
    given += ("--train.steps=4", "--train.check_every=1", "--train.clip=0", f"--run_dir={folder}", *options)
    train_on_threads(*given, size=size, build=build)
    return folder


def test_a_bad_sample_is_named_with_its_micro_batch_and_rank(tmp_path: Path) -> None:
    clean = _train(tmp_path / "clean", size=3)
    found = find_difference(clean, _train(tmp_path / "bad", size=1, bad_sample=40))
    assert found.step is not None and set(found.values) >= {"loss", "grad_norm"}
    (text,) = found.passes
    number, rest = text.removeprefix("micro-batch ").split(" of 6 (rank ")
    rank, samples = rest.rstrip(")").split(" on ")[0], rest.rstrip(")").split(" samples ")[1]
    assert int(rank) == (int(number) - 1) // 2 and "40" in samples.split(", ")
    other = find_difference(clean, _train(tmp_path / "other", "--seed=2", size=1))
    assert other.step == 1 and other.passes == ["each micro-batch"]


def test_a_wrong_gradient_is_named_by_its_tensor(tmp_path: Path) -> None:
    clean, bad = _train(tmp_path / "clean", size=3), _train(tmp_path / "bad", size=1, bad_pass=8)
    found = find_difference(clean, bad)
    assert (found.step, found.passes, found.tensors) == (2, [], ["2.weight"])
    assert any("a backward pass or an exchange differs" in line for line in found.lines())


def test_many_passes_have_few_hashes() -> None:
    numbers = [[float(number), 1.0] for number in range(2 * MOST_PASSES + 5)]
    hashes = pass_hashes(numbers)
    assert len(hashes) == 8 * 45  # of three passes each, the last of one
    numbers[4][1] = 2.0
    assert [n for n in range(45) if hashes[8 * n : 8 * n + 8] != pass_hashes(numbers)[8 * n : 8 * n + 8]] == [1]


@pytest.mark.slow
def test_steps_of_three_ranks_are_repeated_on_one(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run), "--step", "5"]) == 0
    out = capsys.readouterr().out
    assert "step-000004" in out and "steps 5 to 5 have the same bits" in out
    other = _with_other_loss(run, tmp_path)
    shutil.rmtree(other / "checkpoints")
    assert main([str(other)]) == 1
    assert "step 4 differs: loss" in capsys.readouterr().out


def test_what_cannot_be_replayed_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no step 9"):
        main([str(run), "--step", "9"])
    other = record(tmp_path, *STACK, "--train.steps=1").run
    with pytest.raises(ConfigError, match="was trained without"):
        main([str(other)])
