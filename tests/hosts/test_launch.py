"""`hvdtrain launch` across two hosts: by ssh, over the link between them, and when that is cut."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil

from hvdtrain.verify.data import verify_data
from tests.support.fake_launch import job_processes
from tests.support.host import until
from tests.support.two_hosts import LINK, TwoHosts

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"
JOB = ["-np", "2", "--elastic", "1:2", "-H", "a:1,b:1", "--events", "events"]


def test_training_over_the_link(hosts: TwoHosts, tmp_path: Path) -> None:
    """What ranks have to agree on before they meet is the same on both, though one is started before the other."""
    toy = [f"--task={SUPPORT / 'toy.py'}:toy", "--train.steps=30", "--observe.tensorboard=false", "--run_dir=run"]
    argv = [sys.executable, "-m", "hvdtrain", "launch", *JOB, "--", *toy]
    hosts.a.run(argv, cwd=tmp_path, environment={"PYTHONPATH": str(ROOT)})
    events = map(json.loads, (tmp_path / "events").read_text().splitlines())
    assert [event["size"] for event in events if event["event"] == "round"] == [2]
    assert not verify_data(tmp_path / "run").wrong


def test_a_cut_link_loses_the_host_and_mending_it_brings_it_back(hosts: TwoHosts, tmp_path: Path) -> None:
    variables = {"PYTHONPATH": str(ROOT), "FAKE_FOLDER": str(tmp_path)}
    argv = [sys.executable, str(SUPPORT / "fake_launch.py"), str(SUPPORT / "fake_rank.py"), *JOB]
    argv += ["--env", "FAKE_FOLDER", "--", "1000000"]
    with hosts.a.popen(argv, cwd=tmp_path, environment=variables, stderr=subprocess.PIPE) as job:
        assert job.stderr is not None
        said = iter(job.stderr.readline, "")
        next(line for line in said if "round 1: 2 rank(s) on 2 host(s)" in line)
        until(lambda: len(_round_1(tmp_path)) == 2, "both ranks in round 1")  # said before they hear of it
        hosts.cut()
        next(line for line in said if "b is lost" in line)
        next(line for line in said if "round 2: 1 rank(s)" in line)
        hosts.mend()
        next(line for line in said if "round 3: 2 rank(s) on 2 host(s)" in line)
        everything = job_processes(tmp_path, ids=hosts.a.processes() | hosts.b.processes())
        (driver,) = (p for p in everything if p.cmdline()[1:2] == [str(SUPPORT / "fake_launch.py")])
        driver.kill()
        _, left = psutil.wait_procs(everything, timeout=40)
    assert len(everything) >= 4 and not left
    assert all(f"if={LINK}" in line for line in _round_1(tmp_path))


def _round_1(folder: Path) -> list[str]:
    """What ranks say of round 1: which interface they have for it."""
    log = folder / "log"
    return [line for line in log.read_text().splitlines() if line.startswith("round 1")] if log.exists() else []


def test_a_host_that_goes_saves_and_the_job_resumes(hosts: TwoHosts, tmp_path: Path) -> None:
    """As a worker of an MPIJob does: the ranks on one host are asked to end, and the launcher starts all again."""
    variables = {"PYTHONPATH": str(ROOT), "OMPI_MCA_odls_base_sigkill_timeout": "1"}
    options = [f"--task={SUPPORT / 'toy.py'}:toy", "--train.steps=1000000", "--observe.tensorboard=false"]
    argv = hosts.mpirun_command([sys.executable, "-m", "hvdtrain", *options, "--run_dir=run"], environment=variables)
    again = [sys.executable, "-m", "hvdtrain.launch.restarts", "1", *argv]
    drain = [sys.executable, "-m", "hvdtrain.launch.drain", "1"]
    others = hosts.a.processes()
    job = hosts.a.popen(again, cwd=tmp_path, environment=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        assert job.stdout is not None
        said = iter(job.stdout.readline, "")
        next(line for line in said if line.startswith("step "))
        hosts.b.run(drain, environment=variables)
        saved = next(line for line in said if "requested by SIGTERM" in line)
        assert "ended with exit code 143: restart 1 of 1" in next(line for line in said if "ended with exit" in line)
        resumed = next(line for line in said if line.startswith("resuming from step"))
        assert saved.split()[3] == resumed.split()[3]
        next(line for line in said if line.startswith("step "))
        hosts.b.run(drain, environment=variables)
        assert "requested by SIGTERM" in "".join(said)
        assert job.wait() == 143
    finally:
        hosts.a.end(hosts.a.processes() - others)
        job.communicate()
