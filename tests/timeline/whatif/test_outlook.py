"""What `hvdtrain plan` says of a job from a run that was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.cli.plan import main
from hvdtrain.config.parse import parse_argv
from tests.support.whatif_run import GBIT, run_folder

STEP_S = 0.186


def _run(tmp_path: Path, *, saves: bool = False, **options: Any) -> Path:
    """Write a run of two ranks with the config and the times that training writes."""
    path = run_folder(tmp_path / "run", size=2, steps=60, link=GBIT, wait_ms=20.0)
    config = parse_argv(["--train.global_batch=8", "--train.micro_batch=4", "--train.steps=60"], None).resolved
    parallel = {**config["parallel"], "compression": "none"}
    started = {"event": "started", "size": 2, "time": 1000.0, "config": {**config, "parallel": parallel}, **options}
    lines, now = [started], 1010.0
    for text in (path / "journal.jsonl").read_text().splitlines()[1:]:
        line = json.loads(text)
        now += line["step_s"]
        lines.append({**line, "time": now})
    if saves:
        now += 2.0
        lines.append({"event": "checkpoint", "at_step": 60, "time": now})
    lines.append({"event": "memory", "at_step": 60, "where": "host", "mib": {"parameters": 100.0}, "time": now})
    (path / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path / "config.yaml"


def _plan(config: Path, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, str]:
    assert main(["--config", str(config), "--json", *more]) == 0
    rows = json.loads(capsys.readouterr().out)
    return {row["name"]: "; ".join(each["value"] for each in rows if each["name"] == row["name"]) for row in rows}


def test_the_end_of_the_same_job_is_that_of_its_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = _run(tmp_path)
    found = _plan(config, capsys, "--ranks", "2", "--train.steps", "10000", "--deadline", "1h")
    assert "as measured" in found["step"] and "100 MiB" in found["memory"]
    assert found["deadline"].endswith("100%") and "device-hours" in found["cost"]
    longer = _plan(config, capsys, "--ranks", "2", "--train.steps", "100000", "--deadline", "1h")
    assert longer["deadline"].endswith(" 0%")
    failing = _plan(config, capsys, "--ranks", "2", "--train.steps", "100000", "--failures_per_day", "24")
    assert "unknown" in failing["checkpoints"] and "failures" in failing["end"]


def test_checkpoints_cost_least_at_a_distance_that_failures_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = _run(tmp_path, saves=True)
    for rate, words in (("24", "least with 24 failure(s)"), ("1e-300", "one at the end costs"), ("1e8", "every 1 ")):
        found = _plan(config, capsys, "--ranks", "2", "--train.steps", "9000", "--failures_per_day", rate)
        assert words in found["checkpoints"]
    assert "is never reached" in found["end"]


@pytest.mark.parametrize(
    ("more", "name", "words"),
    [
        (["--train.steps", "60", "--train.stop_at", "500"], "end", "step 60 after"),
        (["--train.epochs", "2"], "end", "unknown: how many steps"),
        (["--precision", "bf16"], "step", "unknown: the run had another --precision"),
        (["--memory.checkpointing", "full"], "step", "unknown: the run had another --memory.checkpointing"),
    ],
)
def test_no_end_is_said_of_steps_that_were_not_measured_or_will_not_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], name: str, words: str
) -> None:
    assert words in _plan(_run(tmp_path), capsys, "--ranks", "2", *more)[name]


@pytest.mark.parametrize("more", [["--failures_per_day", "-1"], ["--failures_per_day", "nan"], ["--hosts", "9"]])
def test_impossible_numbers_are_refused(tmp_path: Path, more: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--config", str(_run(tmp_path)), "--ranks", "2", *more])


def test_another_job_is_predicted_with_what_would_be_faster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = _run(tmp_path)
    link = ("--hosts", "8", "--bandwidth_gbit", "0.2", "--latency_us", "50")
    found = _plan(config, capsys, "--ranks", "8", *link, "--train.steps", "10000", "--train.global_batch", "32")
    assert "predicted" in found["step"] and "--parallel.compression powersgd:4" in found["faster"]
    alone = _plan(config, capsys, "--ranks", "2", "--parallel.tp", "2")
    assert "unknown: the run had another --parallel.tp" in alone["step"] and "end" not in alone
    few = config.parent / "journal.jsonl"
    few.write_text("".join(line + "\n" for line in few.read_text().splitlines()[:12]))
    assert "has not trained 16 steps" in _plan(config, capsys)["step"]
