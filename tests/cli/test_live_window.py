"""A window asked for while a real job runs: the same steps on all ranks, and the files said."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hvdtrain.__main__ import main
from hvdtrain.observe.span_trace import LAST_STEPS
from tests.support.gallery import Gallery
from tests.support.launch import ENVIRONMENT, ROOT, stop_by_sigterm, training

TOY = [f"--task={ROOT}/tests/support/toy.py:toy", "--train.steps=1000000", "--train.global_batch=8"]
TOY += ["--train.micro_batch=2", "--checkpoint.every=0", "--run_dir=run"]


@contextmanager
def running(folder: Path, *options: str) -> Iterator[None]:
    """A process that trains until the end of the block."""
    with training(*TOY, *options, size=1, cwd=folder) as process:
        try:
            yield
        finally:
            stop_by_sigterm(process)


def timeline(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, "-m", "hvdtrain", "timeline", *arguments]
    return subprocess.run(call, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)


def steps_of(text: str) -> list[int]:
    """Of the spans in a trace file's text, in order."""
    events = json.loads(text)
    return sorted({event["args"]["step"] for event in events if event["ph"] == "X" and event["name"] == "step"})


def numbers(text: str) -> list[int]:
    return [int(word.rstrip(";,")) for word in text.split() if word.rstrip(";,").isdigit()]


@pytest.mark.slow
def test_a_window_is_opened_and_closed_on_all_ranks_at_the_same_steps(gallery: Gallery) -> None:
    job = gallery["signalled"]
    code, begun, error = job.notes["start"]
    assert code == 0, error
    (first,) = numbers(begun)
    assert "hvdtrain timeline stop run" in begun
    code, ended, error = job.notes["stop"]
    assert code == 0, error
    begin, last = numbers(ended.splitlines()[0])[:2]
    assert begin == first
    for rank in range(2):  # all of it was there by then, and the run went on
        steps = steps_of(job.notes["spans"][f"spans-rank-{rank}.json"])
        assert [step for step in steps if step > 4] == [*range(first, last + 1)]
    horovod = f"horovod-steps-{first}-{last}.json"
    assert f"run/timeline/{horovod}" in ended
    json.loads(job.notes["horovod"][horovod])
    assert job.events("warning") == []


@pytest.mark.slow
def test_a_window_of_n_steps_ends_by_itself_with_a_requested_profile(tmp_path: Path) -> None:
    with running(tmp_path):
        assert timeline(tmp_path, "stop", "run").returncode == 1, "none is open"
        begun = timeline(tmp_path, "start", "run", "--steps", "3", "--profile")
        first, last = numbers(begun.stdout)[:2]
        assert last == first + 2
        assert "not recorded: Horovod's Timeline" in begun.stdout  # one rank has nothing to exchange
        while timeline(tmp_path, "stop", "run").returncode == 0:
            pass
    folder = tmp_path / "run/timeline"
    steps = set(steps_of((folder / "spans-rank-0.json").read_text()))
    assert {*range(first, last + 1)} <= steps and steps.isdisjoint(range(21, first - LAST_STEPS))
    assert (folder / f"torch-steps-{first}-{last}-rank-0.json").exists()


@pytest.mark.slow
def test_without_traces_the_command_says_what_to_do(tmp_path: Path) -> None:
    with running(tmp_path, "--observe.timeline=off"):
        found = timeline(tmp_path, "start", "run")
    assert found.returncode == 1 and "--observe.timeline auto" in found.stderr


@pytest.mark.parametrize(("made", "says"), [(None, "is not a run folder"), ("finished", "is finished")])
def test_there_must_be_a_run_that_is_not_over(
    made: str | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if made:
        (tmp_path / "journal.jsonl").write_text(json.dumps({"event": made}) + "\n")
    assert main(["timeline", "start", str(tmp_path)]) == 1
    assert says in capsys.readouterr().err
