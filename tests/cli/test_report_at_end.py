"""The last lines of real jobs: where the time went, of all ranks, after whatever ended them well."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from hvdtrain.observe.journal import read_journal
from hvdtrain.timeline.telling.brief import MOST_LINES
from tests.support.launch import stop_by_sigterm, train, training

TOY = [
    f"--task={Path(__file__).parents[1] / 'support' / 'toy.py'}:toy",
    "--train.global_batch=4",
    "--train.micro_batch=2",
    "--run_dir=run",
]


def _told(out: str) -> list[str]:
    """The lines between the run's figures and the commands."""
    lines = out.splitlines()
    begin = next(at for at, line in enumerate(lines) if line.startswith("where a step's "))
    return lines[begin : lines.index("look further:")]


@pytest.mark.parametrize("size", [1, 2])
def test_it_says_where_the_time_went(size: int, tmp_path: Path) -> None:
    done = train(*TOY, "--train.steps=30", size=size, cwd=tmp_path)
    told = _told(done.stdout)
    assert 5 <= len(told) <= MOST_LINES
    assert sum("who is late: " in line for line in told) == 1
    assert sum(line.startswith("to change: ") for line in told) == 1
    assert "run/timeline/report.html, in a browser" in done.stdout
    page = (tmp_path / "run/timeline/report.html").read_text()
    assert f"on {size} rank" in page
    assert read_journal(tmp_path / "run/journal.jsonl")[-1]["event"] == "explained"


def test_without_traces_the_journal_tells(tmp_path: Path) -> None:
    done = train(*TOY, "--train.steps=6", "--observe.timeline=off", cwd=tmp_path)
    assert "where the time went (rank 0):" in done.stdout
    assert "report.html" not in done.stdout


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_signal_that_saves_is_such_an_end(size: int, tmp_path: Path) -> None:
    options = [*TOY, "--train.steps=1000000", "--observe.line_every_s=0.1"]
    with training(*options, size=size, cwd=tmp_path, after=20) as process:
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


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_run_that_failed_is_not_explained_so(rank: int, tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    options = ["--task=failing.py:build", f"--rank={rank}", *TOY[1:], "--train.steps=5000"]
    done = train(*options, size=2, cwd=tmp_path, check=False)
    assert done.returncode != 0
    assert "that was it" in done.stderr + done.stdout
    assert not (tmp_path / "run/timeline/report.html").exists()
