"""Batch jobs on a real Slurm, pre-empted, cancelled, out of time; the loss curve is that of a run left alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hvdtrain.launch.spec import Batch, JobSpec, Mpi
from hvdtrain.launch.targets import schedulers as target
from hvdtrain.observe.past_journal import read_steps
from tests.support.journals import read_events, read_journal, read_losses
from tests.support.launch import ROOT, train
from tests.support.slurm import SLOTS, Slurm, one_node

STEPS = 40
PATHS = {"PYTHONPATH": str(ROOT)}
"""What the task of the job imports is the tests' own."""
PACED = [
    *(f"--task={ROOT}/tests/support/toys.py:paced", f"--train.steps={STEPS}", "--train.global_batch=8"),
    *("--train.micro_batch=2", "--checkpoint.every=0", "--loader.workers=0"),
    "--sample_s=0.4",  # a minute in the first start: long enough for what is done to it, on a busy machine too
]
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL")
IN_TIME = '[ -z "${SLURM_RESTART_COUNT:-}" ] || scontrol update JobId="$SLURM_JOB_ID" TimeLimit=30'
"""A line of a script by which the job has time enough when it is started again, on a busy machine too."""
OPEN_MPI = Mpi("openmpi", "4.1.8")


@dataclass
class Job:
    """One that was submitted, working in `folder`."""

    slurm: Slurm
    folder: Path
    number: str

    @property
    def journal(self) -> Path:
        return self.folder / "run/journal.jsonl"

    @property
    def log(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("hvdtrain-*.log")))

    def until_it_trains(self) -> None:
        def trains() -> bool:
            assert self.slurm.state(self.number) not in ENDED, self.log
            return self.journal.exists() and len(read_steps(self.journal)) > 3

        self.slurm.until(trains, "steps")

    def until_it_is(self, wanted: str) -> None:
        def ended() -> bool:
            return self.slurm.state(self.number) in ENDED

        self.slurm.until(ended, f"the end of job {self.number}")
        assert self.slurm.state(self.number) == wanted, self.log


def script(folder: Path, *arguments: str, slurm_mpi: str = "pmix", **batch: object) -> str:
    job = JobSpec(
        arguments or (*PACED, "--run_dir=run"),
        ranks=2,
        python=sys.executable,
        folder=str(folder),
        mpi=OPEN_MPI if slurm_mpi else None,
        slurm_mpi=slurm_mpi,
        batch=Batch(**{"time_s": 1800, **batch}),  # type: ignore[arg-type]
    )
    return target.render_slurm(job).text


def submit(slurm: Slurm, folder: Path, text: str, partition: str) -> Job:
    return Job(slurm, folder, slurm.submit(text, f"--partition={partition}", cwd=folder, environment=PATHS))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of the job in one process that nobody disturbs."""
    folder = tmp_path_factory.mktemp("alone")
    train(*PACED, "--run_dir=run", cwd=folder, environment=PATHS)
    return read_losses(folder / "run")


def assert_went_on(job: Job, alone: list[float]) -> None:
    assert read_losses(job.folder / "run") == pytest.approx(alone, rel=1e-6)
    steps = [line["step"] for line in read_journal(job.journal) if "loss" in line and "event" not in line]
    assert steps == list(range(1, STEPS + 1))  # none twice: the ranks saved where they stopped
    assert len(read_events(job.folder / "run", "resumed")) == int(job.slurm.facts(job.number)["Restarts"]) >= 1


@pytest.fixture(scope="module", autouse=True)
def short_of_time(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """A job that gets the notice while other tests run: Slurm sees to time limits twice a minute."""
    folder = tmp_path_factory.mktemp("notice")
    arguments = [*PACED, "--sample_s=0.6", "--run_dir=run"]
    text = script(folder, *arguments, time_s=120, notice_s=55, setup=(IN_TIME,))
    with one_node() as undisturbed:
        yield submit(undisturbed, folder, text, "low")


def test_a_pre_empted_job_resumes(slurm: Slurm, alone: list[float], tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, script(tmp_path), "low")
    job.until_it_trains()
    rival = slurm.submit("#!/bin/bash\n", "--partition=high", f"--ntasks={SLOTS}", "--output=/dev/null", cwd=tmp_path)
    slurm.until(lambda: slurm.state(rival) == "COMPLETED", f"the rival to run\n{job.log}")
    job.until_it_is("COMPLETED")
    assert "pre-empted: requeue 1 of 20" in job.log
    assert "start 2 on node" in job.log
    assert_went_on(job, alone)


def test_a_job_that_is_cancelled_saves_and_stays_cancelled(slurm: Slurm, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, script(tmp_path), "low")
    job.until_it_trains()
    slurm.run(["scancel", job.number])
    job.until_it_is("CANCELLED")
    assert "back into the queue" not in job.log
    assert "Slurm ends the job" in job.log
    step = max(read_steps(job.journal))
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("step-*")] == [f"step-{step:06d}"]


def test_a_noticed_job_of_our_own_driver_resumes(slurm: Slurm, alone: list[float], tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, script(tmp_path, slurm_mpi=""), "low")
    job.until_it_trains()
    slurm.run(["scancel", "--batch", "--signal=USR1", job.number])
    job.until_it_is("COMPLETED")
    assert "stopped by the notice: requeue 1 of 20" in job.log
    assert_went_on(job, alone)


def test_a_job_short_of_time_saves_goes_back_and_finishes(short_of_time: Job, alone: list[float]) -> None:
    short_of_time.until_it_is("COMPLETED")
    assert "notice: the ranks save and stop" in short_of_time.log
    assert "stopped by the notice: requeue 1 of 20" in short_of_time.log
    assert_went_on(short_of_time, alone)
