from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import hvdtrain
from hvdtrain.cli.evaluate import main
from hvdtrain.comm.base import Comm
from hvdtrain.config.parse import parse_argv
from hvdtrain.state.checkpoint_store import load
from hvdtrain.training.evaluate_run import Evaluated, Split, evaluate_run, for_evaluation
from tests.support.journals import read_journal
from tests.support.thread_comm import on_ranks
from tests.support.toy import toy

TASK = "tests.support.toy:toy"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of 8 steps with three checkpoints."""
    monkeypatch.chdir(tmp_path)
    train = {"steps": 8, "global_batch": 4, "micro_batch": 4, "eval_samples": 0}
    hvdtrain.train({"train": train, "checkpoint": {"every": 3}, "task": TASK, "run_dir": "run"})
    return Path("run")


def _evaluate(run: Path, size: int, *options: str, one_by_one: bool = True, split: Split = "heldout") -> Evaluated:
    parsed = parse_argv(["--config", str(run / "config.yaml"), *options], toy)
    config = for_evaluation(parsed.config, 0, one_by_one=one_by_one)
    read = partial(load, run / "checkpoints/step-000008")

    def body(comm: Comm) -> Evaluated:
        return evaluate_run(config, partial(toy, **parsed.task_args), read, comm, split)

    found = on_ranks(size, body)
    assert all(each == found[0] for each in found)
    return found[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16-weights"])
@pytest.mark.parametrize("split", ["heldout", "train"])
@pytest.mark.some(2)
def test_any_number_of_ranks_finds_the_same_bits(run: Path, split: Split, precision: str) -> None:
    one, *others = (_evaluate(run, size, f"--precision={precision}", split=split) for size in (1, 2, 3))
    assert all(other == one for other in others)
    assert one.samples == len(one.passes) == {"heldout": 10, "train": 50}[split]
    assert [start for start, _ in one.passes] == list(range(one.samples))
    loss, weight = (sum(sums["loss"][part] for _, sums in one.passes) for part in (0, 1))
    assert one.means["loss"] == pytest.approx(loss / weight)
    positive = sum(sums["metric/positive"][0] for _, sums in one.passes)
    assert one.means["positive"] == pytest.approx(positive / one.samples)
    two, three = (_evaluate(run, size, one_by_one=False, split=split) for size in (2, 3))
    assert two == three and len(two.passes) == -(-two.samples // 4)


def test_a_sample_has_its_own_loss(run: Path) -> None:
    task = toy()
    task.model.load_state_dict(dict(load(run / "checkpoints/step-000008").tensors["model"]))
    task.model.eval()
    heldout: Any = task.heldout_data
    for number, sums in _evaluate(run, 2).passes:
        x = heldout.x[number : number + 1]
        with torch.no_grad():
            expected, weight = task.loss(task.model, (x, x.sum(1)))
        assert sums["loss"] == pytest.approx([float(expected), float(weight)], rel=0.2, abs=0.05)  # samples have noise


def test_it_finds_what_training_has_found(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest checkpoint, or a named one. Nothing is written to the run."""
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    recorded = {e["at_step"]: e for e in read_journal(run / "journal.jsonl") if e.get("event") == "evaluation"}
    for path, step in ((run, 8), (run / "checkpoints/step-000003", 3), (run / "checkpoints/step-000008", 8)):
        capsys.readouterr()
        assert main([str(path), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["loss"] == pytest.approx(recorded[step]["loss"], rel=1e-12)
        assert found["positive"] == recorded[step]["metrics"]["positive"]
        assert found["model"].endswith(f"step-{step:06d}") and found["samples"] == 10
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_a_misspelt_option_and_a_copied_checkpoint_are_explained(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints/step-000003").rename("copied")
    wrong = {"--spilt train run": "did you mean --split?", "run --smaples=3": "did you mean --samples?"}
    for given, advice in {**wrong, "copied": "add --config FILE, a copy of the run's config.yaml"}.items():
        assert main(given.split()) == 2 and advice in capsys.readouterr().err
    assert main(["copied", "--config", "run/config.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 10


def test_values_of_each_sample(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main([str(run), "--per_sample", "each.jsonl", "--samples", "5"]) == 0
    out = capsys.readouterr().out
    lines = [json.loads(line) for line in Path("each.jsonl").read_text().splitlines()]
    assert [line["sample"] for line in lines] == [0, 1, 2, 3, 4]
    loss = sum(line["loss"][0] for line in lines) / sum(line["loss"][1] for line in lines)
    rows = [line.split() for line in out.splitlines()]
    assert ["loss", f"{loss:.6g}"] in rows and ["samples", "5"] in rows


def test_what_is_refused(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for argv, text in (
        (["nowhere"], "there is no model in 'nowhere'"),
        ([str(run), "--heldout", "0"], "no samples to evaluate on"),
        ([str(run), "--hidden", "3"], "the checkpoint does not match the model"),
        ([str(run), "--lr", "3"], "no option --lr"),
    ):
        assert main(argv) == 2
        assert text in capfd.readouterr().err
    for path in (run / "checkpoints").iterdir():
        (path / "model.safetensors").write_bytes(b"")
    assert main([str(run)]) == 2
    assert "is damaged" in capfd.readouterr().err
