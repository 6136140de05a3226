"""`hvdtrain verify` on real jobs: kills, resizes, and a task that no checkpoint can hold."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import psutil
import pytest
import yaml

from hvdtrain.__main__ import main
from hvdtrain.verify.data import verify_data
from tests.support.gallery import STEPS, Gallery
from tests.support.launch import train

SUPPORT = Path(__file__).parents[1] / "support"
TOY = [f"--task={SUPPORT}/toy.py:toy", "--train.global_batch=9", "--train.micro_batch=2", "--checkpoint.every=4"]


@pytest.mark.slow
def test_data_of_a_running_run(gallery: Gallery) -> None:
    assert gallery["signalled"].notes["verified"] == 0


def test_data_of_a_run_that_was_killed(gallery: Gallery, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    shutil.copytree(gallery["killed"].run, run)
    assert main(["verify", "data", str(run)]) == 0
    report = verify_data(run)
    assert (report.last, report.end) == (STEPS, 9 * STEPS)
    out = capsys.readouterr().out
    assert "; 1 interrupted" in out and "every sample exactly once" in out
    (file,) = (run / "ledger").iterdir()
    lines = file.read_bytes().split(b"\n")
    file.write_bytes(b"\n".join([line for line in lines if not line.startswith(b"[0,1,2,")]))
    assert main(["verify", "data", str(run)]) == 1
    assert "rank 1 does not have step 2" in capsys.readouterr().out


@pytest.mark.parametrize(("task", "code"), [("toy.py:toy", 0), ("toys.py:forgetful", 1)])
@pytest.mark.slow
def test_resume_on_two_ranks(
    task: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT.parents[1]))
    found = {"PYTHONPATH": str(SUPPORT.parents[1])}
    train(f"--task={SUPPORT}/{task}", *TOY[1:], "--train.steps=1", "--run_dir=run", cwd=tmp_path, environment=found)
    before = {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")}
    assert main(["verify", "resume", "run", "--steps", "2", "--sizes", "2"]) == code
    told = capfd.readouterr().out
    assert ("WRONG: 2 + 2 on 2 rank(s) against 4: step 3: loss" if code else "the runs are equal") in told
    assert {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")} == before


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


@pytest.mark.parametrize(("number", "code", "size"), [("SIGINT", 130, 1), ("SIGTERM", 143, 2), ("SIGHUP", 129, 1)])
@pytest.mark.slow
def test_a_signal_ends_the_job_and_leaves_nothing(
    number: str,
    code: int,
    size: int,
    tmp_path: Path,
    scratch: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT.parents[1]))
    monkeypatch.setenv("INTERRUPTED", f"{number} {os.getpid()}")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(yaml.safe_dump({"task": f"{SUPPORT}/toys.py:interrupting"}))
    own = psutil.Process().children(recursive=True)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # who starts tests may have it ignored
    try:
        ended = main(["verify", "resume", str(run), "--steps", "1000000", "--sizes", str(size)])
    except SystemExit as ending:
        ended = int(str(ending.code))
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended == code
    assert capfd.readouterr().err == ("hvdtrain: interrupted\n" if number == "SIGINT" else "")
    assert psutil.Process().children(recursive=True) == own
    left = [p.pid for p in psutil.process_iter(["cmdline"]) if str(scratch) in " ".join(p.info["cmdline"] or [])]
    assert left == [], "its own ranks, whoever is their parent now"
    assert list(scratch.iterdir()) == []


def test_where_there_is_no_run_nothing_is_made(scratch: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "resume", str(scratch / "nope")]) == 1
    assert "cannot read" in capfd.readouterr().err
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("option", ["--sizes=0,1", "--sizes=1,two", "--sizes=", "--steps=0", "--steps=x"])
def test_an_invalid_number_is_reported_in_words(option: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["verify", "resume", "run", option])
    told = capfd.readouterr().err
    assert "is not a positive whole number" in told
    assert ("numbers of ranks" in told) == option.startswith("--sizes")
