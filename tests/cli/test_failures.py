"""Real jobs that fail: one card, on the screen once and in the run folder, and an end that is soon and not zero."""

from __future__ import annotations

import json
import os
import select
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.gallery import SECRET, Gallery
from tests.support.journals import read_journal
from tests.support.launch import ROOT, ending, run, train, training

TASK = f"--task={ROOT}/tests/support/failing.py:failing"
SHORT = ["--train.steps=1000", "--train.global_batch=8", "--train.micro_batch=4", "--run_dir=run"]
SHORT += ["--checkpoint.every=2"]
HEAD = "the run failed"
STALL = "--observe.stall_timeout_s=8"


def _fails(folder: Path, *options: str, size: int = 2, launcher: str | None = None, code: int | None = None) -> str:
    """Run a job that fails; its merged output, after what holds for every failure was checked."""
    how = {"size": size, "launcher": launcher, "environment": {"TOKEN_OF_A_TRACKER": SECRET}}
    done = train(TASK, *SHORT, *options, cwd=folder, check=False, **how)
    output = done.stdout + done.stderr
    assert done.returncode != 0 and code in (None, done.returncode), output
    text = (folder / "run/failure.txt").read_text()
    assert SECRET not in text + (folder / "run/failure.json").read_text()
    _told_once(output, text)
    return output


def _card(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run/failure.json").read_text())  # type: ignore[no-any-return]


def _told_once(output: str, text: str) -> None:
    assert output.count(HEAD) == 1, output
    missing = [line for line in text.splitlines() if line.strip() and line not in output]
    assert not missing, f"{missing} is not in\n{output}"


@pytest.mark.slow
def test_an_exception_on_one_rank_ends_the_job_and_is_reported_once(gallery: Gallery) -> None:
    job = gallery["raised"]
    assert job.code != 0
    _told_once(job.out + job.err, (job.run / "failure.txt").read_text())
    assert "rank 1 has had enough" in job.err and "rank 1 on " in job.err
    assert SECRET not in (job.run / "failure.txt").read_text() + (job.run / "failure.json").read_text()
    card = job.card()
    assert (card["kind"], card["ranks"], card["size"]) == ("exception", [1], 2)
    assert card["checkpoint"] == "run/checkpoints/step-000002"
    where = {s["who"]["rank"]: s for s in card["statements"]}
    assert where[1]["step"] == 4 and where[1]["last"] == "forward"
    assert where[1]["fault"]["type"] == "RuntimeError"
    assert where[0]["waits"] and "gradients/0" in where[0]["in_flight"]


@pytest.mark.slow
def test_the_command_on_the_card_resumes_the_run(gallery: Gallery) -> None:
    """It was typed in a shell after rank 1 of the run had been killed."""
    job = gallery["killed"]
    words = job.notes["card"]["resume"].split()
    assert words[words.index("-np") + 1] == "2"
    assert job.code == 0 and "resuming from step 20" in job.out
    assert ending(job.run / "journal.jsonl")["event"] == "finished"
    assert not list(job.run.glob("failure.*")), "a run that went on has not failed"
    assert len(list((job.run / "failures").iterdir())) == 2
    assert not (job.run / ".ranks").exists()


@pytest.mark.parametrize(
    ("options", "size", "words"),
    [
        (["--how=raise", "--everywhere=true"], 1, ["rank 0 on ", "rank 0 has had enough"]),
        (["--how=raise", "--everywhere=true"], 2, ["has had enough"]),
        (["--how=user", "--everywhere=true"], 2, ["a sample is missing", "expected: samples", "next: bring some"]),
        (["--how=leave"], 2, ["sys.exit(3) in "]),
        (["--how=memory"], 2, ["ran out of memory", "weight 0.0 MiB", "--train.micro_batch 2 (is 4)"]),
    ],
    ids=["alone", "each rank", "of the user", "exit", "memory"],
)
@pytest.mark.slow
def test_an_error_is_reported_once(options: list[str], size: int, words: list[str], tmp_path: Path) -> None:
    output = _fails(tmp_path, *options, size=size, code=1 if size == 1 else None)
    assert all(word in output for word in words)
    if "--everywhere=true" in options:
        assert output.count("Traceback") == ("--how=raise" in options)
    if size == 1:
        assert read_journal(tmp_path / "run/journal.jsonl")[-1]["event"] == "failed"


def _named_as_killed(card: dict[str, Any], output: str) -> None:
    assert "ended without an error message" in output
    assert (card["kind"], card["ranks"]) == ("killed", [1])
    assert [s["who"]["rank"] for s in card["statements"]] == [0]
    assert card["silent"][0]["last"]["rss"] > 0


def test_a_killed_rank_is_named_by_the_survivor(gallery: Gallery) -> None:
    notes = gallery["killed"].notes
    assert notes["code"] != 0
    _told_once(notes["said"], notes["text"])
    _named_as_killed(notes["card"], notes["said"])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "kill"])
@pytest.mark.parametrize("launcher", ["horovodrun", "horovodrun --gloo"])
def test_a_rank_that_fails_is_named_under_another_launcher(launcher: str, how: str, tmp_path: Path) -> None:
    output = _fails(tmp_path, f"--how={how}", "--at=4", launcher=launcher)
    if how == "kill":
        return _named_as_killed(_card(tmp_path), output)
    card = _card(tmp_path)
    assert "rank 1 has had enough" in output
    assert (card["kind"], card["ranks"], card["size"]) == ("exception", [1], 2)


@pytest.mark.parametrize("elastic", [("--to", "hvdtrain"), ("--elastic", "2:2", "--elastic-timeout", "1")])
@pytest.mark.slow
def test_a_survivor_names_the_killed_rank_when_the_driver_gives_up(elastic: tuple[str, ...], tmp_path: Path) -> None:
    launch = ["-m", "hvdtrain", "launch", "-np", "2", *elastic, "--", TASK, *SHORT, "--how=kill"]
    done = run(launch, cwd=tmp_path, check=False)
    assert done.returncode == 1 and (done.stdout + done.stderr).count(HEAD) == 1, done.stderr
    card = _card(tmp_path)
    _named_as_killed(card, done.stdout + done.stderr)
    assert " launch -np 2 " in card["resume"] and card["checkpoint"]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.slow
def test_a_stopped_rank_is_named_and_ended(rank: int, tmp_path: Path) -> None:
    text = (ROOT / "tests/support/failing.py").read_text().replace("rank() == 1", f"rank() == {rank}")
    (tmp_path / "failing.py").write_text(text)
    output = _fails(tmp_path, "--task=failing.py:failing", "--how=stop", STALL, code=124)
    assert f"rank {rank} on " in output and " is stopped" in output
    assert f"started by rank(s) {1 - rank}, not by {rank}" in output
    assert "horovod_torch_wait_and_clear" in output, "the stack of the rank that waits"
    card = _card(tmp_path)
    assert (card["kind"], card["ranks"]) == ("stall", [rank])
    with suppress(ProcessLookupError):
        stopped = os.pidfd_open(card["silent"][0]["who"]["pid"])
        assert select.select([stopped], [], [], 20)[0], "the stopped process is left behind"
        os.close(stopped)


@pytest.mark.slow
def test_a_hanging_rank_is_distinguished_from_those_that_wait_for_it(tmp_path: Path) -> None:
    output = _fails(tmp_path, "--data=hang", STALL, code=124)
    said = " ".join(output.split())
    assert "in data at step" in said and "the others wait for it" in said
    assert "gradients/0  started by rank(s) 0, not by 1 (bias, weight)" in output
    assert "_hang" in output, "the stack of the rank that hangs"
    card = _card(tmp_path)
    assert card["ranks"] == [1]
    assert sorted(s["who"]["rank"] for s in card["statements"]) == [0, 1]


SCRIPT = """
import functools, sys
import hvdtrain
from tests.support.failing import failing
if __name__ == "__main__":
    options = {"train": {"steps": 1000, "global_batch": 8, "micro_batch": 4}, "run_dir": "run"}
    try:
        hvdtrain.train(options, functools.partial(failing, how="raise"))
    except RuntimeError as error:
        if sys.argv[1] == "raise":
            raise
        if "rank 1" not in str(error):
            sys.exit(5)
"""


@pytest.mark.parametrize("how", ["raise", "catch"])
@pytest.mark.slow
def test_from_python_the_error_comes_out_and_the_card_is_written(how: str, tmp_path: Path) -> None:
    """Where the script catches it on the rank that failed, and ends well there, the other rank's end is not good."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run(["script.py", how], size=2, cwd=tmp_path, environment={"PYTHONPATH": str(ROOT)}, check=False, without=())
    assert done.returncode != 0
    assert HEAD not in done.stdout + done.stderr
    assert (how == "raise") == ("RuntimeError: rank 1 has had enough" in done.stderr)
    card = _card(tmp_path)
    assert card["ranks"] == [1]
    assert card["resume"].endswith(f"script.py {how}  # with run_dir set to run") and "-np 2 " in card["resume"]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.slow
def test_of_a_rank_that_is_killed_no_loader_process_stays(size: int, tmp_path: Path) -> None:
    options = ["--run_dir=run", "--train.steps=1000000", "--train.global_batch=4", "--train.micro_batch=2"]
    toy = f"--task={ROOT}/tests/support/toy.py:toy"
    with training(toy, *options, "--loader.workers=1", size=size, cwd=tmp_path, forks=False) as process:
        job = psutil.Process(process.pid)
        processes = [job, *job.children(recursive=True)]
        ranks = [p for p in processes if p.cmdline()[1:3] == ["-m", "hvdtrain"]]
        assert len(ranks) == size and len(processes) >= 4 * size  # each with a tracker, a fork server and a loader
        for rank in ranks:
            rank.kill()
        assert process.stdout is not None
        process.stdout.read()
    _, alive = psutil.wait_procs(processes, timeout=30)
    for left in alive:
        left.kill()
    assert not alive
