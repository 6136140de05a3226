from __future__ import annotations

import signal
from pathlib import Path

import pytest

from hvdtrain.__main__ import main
from hvdtrain.timeline.report.terminal import MOST_SUMMARY_LINES
from tests.support.gallery import Gallery
from tests.support.launch import ROOT


def _told(out: str) -> list[str]:
    """The lines before the run's figures and commands."""
    lines = out.splitlines()
    begin = next(at for at, line in enumerate(lines) if line.startswith("step time: "))
    return lines[begin : lines.index("", begin)]


@pytest.mark.parametrize(("name", "size"), [("one", 1), ("two", 2), pytest.param("three", 3, marks=pytest.mark.slow)])
def test_it_reports_where_the_time_went(name: str, size: int, gallery: Gallery) -> None:
    job = gallery[name]
    told = _told(job.out)
    assert 5 <= len(told) <= MOST_SUMMARY_LINES
    assert sum(line.startswith("straggler: ") for line in told) == 1
    assert sum(line.startswith("finding: ") for line in told) == 1
    assert "run/timeline/report.html (open in a browser)" in job.out
    assert f"on {size} rank" in (job.run / "timeline/report.html").read_text()
    assert job.journal[-1]["event"] == "explained"


@pytest.mark.slow
def test_a_signal_that_saves_is_such_an_end(gallery: Gallery) -> None:
    job = gallery["signalled"]
    assert job.code == 128 + signal.SIGTERM
    assert "stopped by SIGTERM" in job.out and len(_told(job.out)) >= 5
    (first,) = (line for line in job.out.splitlines() if line.startswith("stopped by Ctrl-C or SIGTERM"))
    assert "; run folder run; to resume: " in first and first.endswith("--config run/config.yaml --run_dir run")
    assert (job.run / "timeline/report.html").exists()


def test_a_run_that_failed_is_not_explained(gallery: Gallery) -> None:
    assert not (gallery["raised"].run / "timeline/report.html").exists()


def test_without_traces_the_journal_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--train.global_batch=4", "--train.micro_batch=2", "--train.steps=3", f"--run_dir={tmp_path}")
    off = ("--observe.timeline=off", "--observe.tensorboard=false")
    assert main([f"--task={ROOT}/tests/support/toy.py:toy", *off, *options]) == 0
    assert not (tmp_path / "tensorboard").exists()
    out = capsys.readouterr().out
    assert "where the time went (rank 0):" in out and "report.html" not in out
