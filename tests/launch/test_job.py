"""Whole jobs: a real driver, real agents, and processes that speak the channel but do not train; one with Horovod."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from hvdtrain.install.record import installed
from tests.support.fake_launch import TIMEOUT_S, FakeJob
from tests.support.scenario import Hosts

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


@pytest.mark.slow
def test_growth_and_removal_by_a_script(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, "localhost:1")
    script = hosts.script.rename(tmp_path / "discover me")
    options = ("-np", "1", "--elastic", "1:4", "--discover", "./discover me", "--events", "events")
    with FakeJob(tmp_path, *options, "--", FOR_EVER) as job:
        job.until("round 1: 1 rank(s) on 1 host(s)")
        hosts.are("localhost:1 127.0.0.1:2")
        job.until("round 2: 3 rank(s) on 2 host(s)")
        hosts.are("localhost:1")
        job.until("round 3: 1 rank(s) on 1 host(s)")
        script.chmod(0o644)
        job.until("the hosts stay the same")
        script.chmod(0o755)
        hosts.are("localhost:1 127.0.0.1:1")
        stop(job, "round 4: 2 rank(s) on 2 host(s)")
    assert len(job.log("end")) == 2


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


HVD_RANK = Path(__file__).parents[1] / "support" / "hvd_rank.py"


@pytest.mark.slow
def test_pending_messages_of_a_dead_rank_fail_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = installed()
    if found is None or not found.fixed:
        pytest.skip("there is no Horovod, or its Gloo does not tell")
    monkeypatch.setenv("HVD_RANK_MARK", str(tmp_path / "mark"))
    with FakeJob(tmp_path, *TWO, "--", "2", "kill:1:5", "512", program=HVD_RANK) as job:
        code, out = job.end()
    assert code == 0 and "round 2: rank 0 of 1 at 5" in out, job.said
    assert any("Connection closed by peer" in line or "reset by peer" in line for line in job.said)
    assert not any("Timed out" in line for line in job.said)
