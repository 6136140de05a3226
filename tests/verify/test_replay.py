"""Steps of a run with the same bits, once more on one rank; and the step at which two such runs part."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hvdtrain.cli.replay import main
from hvdtrain.errors import ConfigError
from tests.laws.test_laws import record
from tests.support.stack import STACK

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
