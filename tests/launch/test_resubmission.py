"""Jobs of PBS and LSF that submit themselves again: their scripts, run by bash with programs that act for others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hvdtrain.errors import LaunchError
from hvdtrain.launch.spec import JobSpec
from hvdtrain.launch.targets import TARGETS
from hvdtrain.observe.past_journal import read_steps
from tests.launch.test_real_mpis import AWKWARD
from tests.support import jobs
from tests.support.journals import read_journal
from tests.support.launch import ROOT, TIMEOUT_S, program

FAKES = """#!{python}
import json, os, pathlib, signal, subprocess, sys, time
name, here = pathlib.Path(sys.argv[0]).name, pathlib.Path(sys.argv[0]).parent
def is_step(text):
    return any('"loss"' in line and '"event"' not in line for line in text.splitlines())
if name == "timeout":  # sends the signal in time, at a clock 20 times as fast, but not before the ranks are ready
    *_, how, seconds = sys.argv[1:5]
    child = subprocess.Popen(sys.argv[5:])
    ready = pathlib.Path(os.environ["READY"])
    since_s = time.monotonic()
    while child.poll() is None and not (
        20 * (time.monotonic() - since_s) >= int(seconds) and ready.exists()
        and (ready.name == "ready" or is_step(ready.read_text()))
    ):
        time.sleep(0.01)
    child.send_signal(getattr(signal, "SIG" + how.removeprefix("--signal=")))
    sys.exit(child.wait())
number = len(list(here.glob("submitted*"))) + (name != "mpirun")
(here / f"{{name}}-{{number}}").write_text(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]))
if name != "mpirun":
    (here / f"submitted-{{number}}").write_text(sys.stdin.read())
    sys.exit(int(os.environ.get("REFUSED", "0")))
kind, _, code = os.environ["CODE"].rpartition("-")
if kind != "at-once":
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    (here / "ready").touch()
    signal.sigwait([signal.SIGUSR1])
    if kind == "deleted":
        script = pathlib.Path(f"/proc/{{os.getppid()}}/stat").read_text().rpartition(")")[2].split()[1]
        os.kill(int(script), signal.SIGTERM)
sys.exit(int(code))
"""
SUBMIT = {"pbs": ["qsub", "-W", "depend=afterany:7"], "lsf": ["bsub", "-w", "ended(7)"]}
BATCH = jobs.Batch(time_s=61, notice_s=60, resubmissions=2)
LATE = {"SECONDS": "1"}
"""With this bash begins a second late: at the time of the notice."""


def spec(folder: Path, **more: object) -> JobSpec:
    given = {"arguments": ("--seed", *AWKWARD), "folder": str(folder), "pass_on": ("PATH",), "gpus_per_node": 0, **more}
    return jobs.queued(replace(jobs.OPEN_MPI_4, prefix=None), BATCH, **given)


def fakes(programs: Path, *names: str) -> None:
    for name in names:
        (programs / name).write_text(FAKES.format(python=sys.executable))
        (programs / name).chmod(0o755)


def run(text: str, programs: Path, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    fakes(programs, "mpirun", "qsub", "bsub", "timeout")
    (programs / "ready").unlink(missing_ok=True)
    (programs / "nodes").write_text("a\nb\n")
    files = dict.fromkeys(("PBS_NODEFILE", "LSB_DJOB_HOSTFILE"), str(programs / "nodes"))
    given = {"PBS_JOBID": "7", "LSB_JOBID": "7", "CODE": code, "READY": str(programs / "ready"), **files, **variables}
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", **LATE, **given}
    return subprocess.run(["bash"], input=text, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)


@pytest.mark.parametrize("target", ["pbs", "lsf"])
def test_a_job_submits_itself_again_until_the_limit(target: str, tmp_path: Path) -> None:
    folder = tmp_path / 'it\'s\na "folder"'
    folder.mkdir()
    text = str(TARGETS[target].render(spec(folder)))
    directives = [line for line in text.splitlines() if line.startswith(("#PBS", "#BSUB"))]
    starts = []
    for number in (1, 2, 3):
        done = run(text, tmp_path, "143")
        argv, where, variables = json.loads((tmp_path / f"mpirun-{number - 1}").read_text())
        starts.append(argv)
        assert done.returncode == 143 and where == str(folder) and variables["HVDTRAIN_STOP_ON_USR1"] == "1"
        if number < 3:
            assert f"requeue {number} of 2" in done.stderr
            program, *options = SUBMIT[target]
            assert json.loads((tmp_path / f"{program}-{number}").read_text())[0] == options
            text = (tmp_path / f"submitted-{number}").read_text()
            assert [line for line in text.splitlines() if line.startswith("#")] == ["#!/bin/bash", *directives]
    assert "after 2 requeues, the limit" in done.stderr and not (tmp_path / "submitted-3").exists()
    assert starts[0] == starts[1] == starts[2] and starts[0][-len(AWKWARD) :] == list(AWKWARD)


@pytest.mark.parametrize("code", ["0", "1", "130", "at-once-143", "deleted-143"])
@pytest.mark.parametrize("target", ["pbs", "lsf"])
def test_other_ends_are_final(target: str, code: str, tmp_path: Path) -> None:
    """A run that finished or failed, ranks that somebody stopped, and a job that was deleted while it saved."""
    batch = replace(BATCH, time_s=600) if code.startswith("at-once") else BATCH
    done = run(str(TARGETS[target].render(replace(spec(tmp_path), batch=batch))), tmp_path, code)
    assert done.returncode == int(code.rpartition("-")[2])
    assert not list(tmp_path.glob("submitted*")) and "requeue" not in done.stderr


def test_a_refused_submission_is_reported(tmp_path: Path) -> None:
    done = run(str(TARGETS["pbs"].render(spec(tmp_path))), tmp_path, "143", REFUSED="1")
    assert "requeue failed: submit it again to resume" in done.stderr


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ({"batch": replace(BATCH, time_s=None)}, "no --time"),
        *(({"is_program": own, "arguments": ("evaluate",)}, "'evaluate'") for own in (True, False)),
    ],
)
@pytest.mark.parametrize("target", ["pbs", "lsf"])
def test_jobs_that_cannot_go_on_by_themselves_are_refused(target: str, more: dict[str, object], found: str) -> None:
    with pytest.raises(LaunchError, match=found):
        TARGETS[target].render(replace(spec(Path("/")), **more))  # type: ignore[arg-type]


def test_without_an_mpi_our_own_driver_stops_the_ranks() -> None:
    text = str(TARGETS["pbs"].render(jobs.queued(None, BATCH)))
    assert "--signal=TERM" in text and "HVDTRAIN_STOP_ON_USR1" not in text


TASK = """
import os
from tests.support.toys import slow

def task():
    return slow(float(os.environ["SAMPLE_S"]))
"""
TRAINING = ("--task=task.py:task", "--train.steps=40", "--train.global_batch=4", "--train.micro_batch=2")
TRAINING += ("--run_dir=run", "--checkpoint.every=0", "--loader.workers=0")


@pytest.mark.slow
@pytest.mark.parametrize("by", ["mpirun", "own driver"])
def test_ranks_save_stop_and_resume_in_the_next_job(by: str, tmp_path: Path) -> None:
    mpi = replace(jobs.OPEN_MPI_4, mpirun=program("mpirun"), prefix=None) if by == "mpirun" else None
    here = {"nodes": 1, "gpus_per_node": 0, "cpus_per_rank": 0, "folder": str(tmp_path)}
    job = jobs.queued(mpi, BATCH, arguments=TRAINING, python=sys.executable, is_root=os.geteuid() == 0, **here)
    job = replace(job, ranks=2)
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "nodes").write_text("localhost\nlocalhost\n")
    fakes(tmp_path, "qsub", "timeout")
    journal = tmp_path / "run/journal.jsonl"
    given = {"PBS_JOBID": "7", "PBS_NODEFILE": str(tmp_path / "nodes"), "READY": str(journal), "PYTHONPATH": str(ROOT)}
    given |= {"SECRET": "", "HF_HOME": str(tmp_path), **LATE}  # the first two are passed on by qsub -v
    environment = {**os.environ, **given, "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def start(text: str, sample_s: str) -> subprocess.CompletedProcess[str]:
        own = {**environment, "SAMPLE_S": sample_s}
        return subprocess.run(["bash"], input=text, env=own, capture_output=True, text=True, timeout=TIMEOUT_S)

    done = start(str(TARGETS["pbs"].render(job)), "0.5")
    assert done.returncode == 143 and "stopped by the notice: requeue 1 of 2" in done.stderr, done.stdout + done.stderr
    stopped = max(read_steps(journal))
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("step-*")] == [f"step-{stopped:06d}"]
    environment["READY"] = str(tmp_path / "never")
    done = start((tmp_path / "submitted-1").read_text(), "0")
    assert done.returncode == 0, done.stdout + done.stderr
    resumed = [line["step"] for line in read_journal(journal) if line.get("event") == "resumed"]
    assert resumed == [stopped] and max(read_steps(journal)) == 40
