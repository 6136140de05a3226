"""The last lines of real jobs: where the time went, of all ranks, after whatever ended them well."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from hvdtrain.timeline.report.terminal import MOST_SUMMARY_LINES
from tests.support.gallery import Gallery
from tests.support.launch import stop_by_sigterm, train, training

TOY = [
    f"--task={Path(__file__).parents[1] / 'support' / 'toy.py'}:toy",
    "--train.global_batch=4",
    "--train.micro_batch=2",
    "--run_dir=run",
]


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
def test_a_signal_that_saves_is_such_an_end_too(gallery: Gallery) -> None:
    job = gallery["signalled"]
    assert job.code == 128 + signal.SIGTERM
    assert "stopped by SIGTERM" in job.out and len(_told(job.out)) >= 5
    assert (job.run / "timeline/report.html").exists()


def test_a_run_that_failed_is_not_explained(gallery: Gallery) -> None:
    assert not (gallery["raised"].run / "timeline/report.html").exists()


@pytest.mark.slow
def test_without_traces_the_journal_tells(tmp_path: Path) -> None:
    done = train(*TOY, "--train.steps=6", "--observe.timeline=off", cwd=tmp_path)
    assert "where the time went (rank 0):" in done.stdout
    assert "report.html" not in done.stdout


@pytest.mark.slow
def test_a_signal_that_saves_is_such_an_end(tmp_path: Path) -> None:
    options = [*TOY, "--train.steps=1000000", "--observe.line_every_s=0.1"]
    with training(*options, size=1, cwd=tmp_path, after=20) as process:
        out = stop_by_sigterm(process)
    assert process.returncode == 128 + signal.SIGTERM
    assert "stopped by SIGTERM" in out and len(_told(out)) >= 5
    assert (tmp_path / "run/timeline/report.html").exists()


FAILING = """
import os
import torch
from hvdtrain import Task

def build(rank: int):
    calls = []
    def loss(model, batch):
        calls.append(1)
        if len(calls) > 20 and int(os.environ["OMPI_COMM_WORLD_RANK"]) == rank:
            raise RuntimeError("that was it")
        return model(batch[0]).sum(), 1
    return Task(torch.nn.Linear(1, 1), loss, torch.utils.data.TensorDataset(torch.ones(8, 1)))
"""


@pytest.mark.parametrize("rank", [0])
@pytest.mark.slow
def test_a_run_that_failed_is_not_explained_so(rank: int, tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    options = ["--task=failing.py:build", f"--rank={rank}", *TOY[1:], "--train.steps=5000"]
    done = train(*options, size=2, cwd=tmp_path, check=False)
    assert done.returncode != 0
    assert "that was it" in done.stderr + done.stdout
    assert not (tmp_path / "run/timeline/report.html").exists()
