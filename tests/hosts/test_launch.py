"""`hvdtrain launch` across two hosts: by ssh, over the link between them, and when that is cut."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from hvdtrain.verify.data import verify_data
from tests.support.two_hosts import LINK, TwoHosts

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"
JOB = ["-np", "2", "--elastic", "1:2", "-H", "a:1,b:1", "--events", "events"]


def command(program: str, *arguments: str) -> list[str]:
    return [sys.executable, str(SUPPORT / "fake_launch.py"), str(SUPPORT / program), *JOB, *arguments]


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "events").read_text().splitlines())
    return [event for event in lines if event["event"] == name]


def running(hosts: TwoHosts, name: str, value: str) -> list[psutil.Process]:
    """Processes of both hosts with a variable in their environment."""
    found = []
    for pid in hosts.a.processes() | hosts.b.processes():
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.environ().get(name) == value:
                found.append(process)
    return found


def test_horovod_over_the_link(hosts: TwoHosts, tmp_path: Path) -> None:
    variables = {"PYTHONPATH": str(ROOT), "HVD_RANK_MARK": str(tmp_path / "mark")}
    before = hosts.b.received_bytes()
    argv = command("hvd_rank.py", "--env", "HVD_RANK_MARK", "--", "3", "kill:1:50")
    done = hosts.a.run(argv, cwd=tmp_path, environment=variables)
    assert [event["size"] for event in events(tmp_path, "round")] == [2, 1, 2]
    assert "[1] round 3: rank 1 of 2 at 0" in done.stdout
    assert hosts.b.received_bytes() > before
    assert not running(hosts, "HVD_RANK_MARK", variables["HVD_RANK_MARK"])


def test_training_over_the_link(hosts: TwoHosts, tmp_path: Path) -> None:
    """What ranks have to agree on before they meet is the same on both, though one is started before the other."""
    toy = [f"--task={SUPPORT / 'toy.py'}:toy", "--train.steps=30", "--observe.tensorboard=false", "--run_dir=run"]
    argv = [sys.executable, "-m", "hvdtrain", "launch", *JOB, "--", *toy]
    hosts.a.run(argv, cwd=tmp_path, environment={"PYTHONPATH": str(ROOT)})
    assert [event["size"] for event in events(tmp_path, "round")] == [2]
    assert not verify_data(tmp_path / "run").wrong


def test_a_cut_link_loses_the_host_and_mending_it_brings_it_back(hosts: TwoHosts, tmp_path: Path) -> None:
    variables = {"PYTHONPATH": str(ROOT), "FAKE_FOLDER": str(tmp_path)}
    argv = command("fake_rank.py", "--env", "FAKE_FOLDER", "--", "1000000")
    with hosts.a.popen(argv, cwd=tmp_path, environment=variables, stderr=subprocess.PIPE) as job:
        assert job.stderr is not None
        said = iter(job.stderr.readline, "")
        next(line for line in said if "round 1: 2 rank(s) on 2 host(s)" in line)
        hosts.cut()
        next(line for line in said if "b is lost" in line)
        next(line for line in said if "round 2: 1 rank(s)" in line)
        hosts.mend()
        next(line for line in said if "round 3: 2 rank(s) on 2 host(s)" in line)
        everything = running(hosts, "FAKE_FOLDER", str(tmp_path))
        (driver,) = (p for p in everything if p.cmdline()[1:2] == [str(SUPPORT / "fake_launch.py")])
        driver.kill()
        _, left = psutil.wait_procs(everything, timeout=40)
    assert len(everything) >= 4 and not left
    rounds = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("round 1")]
    assert all(f"if={LINK}" in line for line in rounds) and len(rounds) == 2


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
