"""Whole jobs: a real driver, real agents, and processes that speak the channel but do not train."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from tests.support.fake_launch import TIMEOUT_S, FakeJob

FOR_EVER = "1000000"
TWO = ("-np", "2", "--elastic", "1:2")


def test_start_and_end(tmp_path: Path) -> None:
    with FakeJob(tmp_path, "-np", "2", "--events", "events", "--", "10") as job:
        code, out = job.end()
    assert code == 0 and job.sizes() == [2] and len(job.log("finished")) == 2
    assert sorted(out.splitlines()) == ["[1] round 1 rank 1 of 2", "round 1 rank 0 of 2"]
    assert all("if=lo" in line for line in job.log("round"))
    assert not [line for line in job.said if "Warning" in line]  # such as of a pipe that is left open


def test_the_last_output_of_a_rank_is_shown(tmp_path: Path) -> None:
    program = Path(__file__).parents[1] / "support" / "visiting_rank.py"
    with FakeJob(tmp_path, "-np", "1", "--", "burst", program=program) as job:
        code, out = job.end()
    assert code == 0 and out.splitlines() == [*map(str, range(5000)), "the last words"]


def stop(job: FakeJob, after: str) -> None:
    """Let it run until the driver says something, then stop it."""
    job.until(after)
    job.signal(signal.SIGTERM)
    assert job.end()[0] == 143, job.said


@pytest.mark.parametrize("deed", ["kill:0", "raise:1", "hang:0"])
@pytest.mark.some(1)
def test_a_dead_rank_is_replaced(tmp_path: Path, deed: str) -> None:
    options = (*TWO, "--hang-timeout", "1", "--events", "events")
    with FakeJob(tmp_path, *options, "--", FOR_EVER, f"{deed}:20") as job:
        stop(job, "round 3")
    assert job.sizes() == [2, 1, 2]
    survivor, newcomer = job.log("round 3 rank=0")[0], job.log("round 3 rank=1")[0]
    assert int(survivor.split("step=")[1].split()[0]) >= 20 and "step=-1" in newcomer
    texts = "\n".join(job.said)
    assert f"rank {deed[-1]} on localhost is dead" in texts[: texts.index("started again")], "heard of before it ended"
    assert "was killed by SIGKILL" in texts or deed == "raise:1"


def test_a_stopped_rank_is_killed(tmp_path: Path) -> None:
    options = (*TWO, "--hang-timeout", "0", "--events", "events")
    with FakeJob(tmp_path, *options, "--", FOR_EVER, "stop:1:5", silent_s=2.0) as job:
        job.until("rank 1 on localhost hangs")
        stop(job, "round 2: 1 rank(s)")


def test_ctrl_c_to_the_driver(tmp_path: Path) -> None:
    with FakeJob(tmp_path, *TWO, "--", FOR_EVER) as job:
        job.until("round 1")
        job.signal(signal.SIGINT)
        assert job.end()[0] == 130


def test_a_signal_to_all_of_it_at_once_lets_ranks_save(tmp_path: Path) -> None:
    """As batch systems do it. An agent that ends by itself would take its ranks with it."""
    # Both ranks may be gone before the driver is told to stop: that is not to end the job here.
    with FakeJob(tmp_path, *TWO, "--restarts", "1", "--", FOR_EVER) as job:
        job.until("round 1")
        (agent,) = job.processes("hvdtrain.launch.agent")
        agent.terminate()
        job.until("was killed by SIGTERM")  # a rank that heeds the signal would have asked to go
        assert agent.is_running()
        job.signal(signal.SIGTERM)
        assert job.end()[0] == 143


def test_a_killed_driver_leaves_nothing(tmp_path: Path) -> None:
    with FakeJob(tmp_path, *TWO, "--", FOR_EVER) as job:
        job.until("round 1")
        there = job.processes()
        job.signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(there, timeout=TIMEOUT_S)
    assert len(there) == 3 and not alive


def test_a_killed_agent_takes_its_ranks_with_it_and_is_started_again(tmp_path: Path) -> None:
    options = ("-np", "2", "--elastic", "1:2", "-H", "localhost:1,127.0.0.1:1", "--events", "events")
    with FakeJob(tmp_path, *options, "--", FOR_EVER) as job:
        job.until("round 1: 2 rank(s) on 2 host(s)")
        _, agent = sorted(job.processes("hvdtrain.launch.agent"), key=lambda process: process.pid)
        ranks = agent.children()
        agent.kill()
        job.until("round 2: 1 rank(s) on 1 host(s)")
        stop(job, "round 3: 2 rank(s) on 2 host(s)")
    assert len(ranks) == 1 and not psutil.wait_procs(ranks, timeout=TIMEOUT_S)[1]
