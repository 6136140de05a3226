"""The scenarios of Horovod's own elastic tests, as jobs that train. Wherever one ends well, nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.observe.past_journal import read_events
from tests.support.chaos_rank import EXCEPTION, MEETING, WRONG_BITS
from tests.support.journals import read_journal
from tests.support.scenario import STEPS, Hosts, Scenario, nothing_lost

pytestmark = pytest.mark.slow
Losses = dict[int, float]


@pytest.mark.parametrize("shard", ["none", "gradients"])
def test_hosts_are_added_and_removed_and_come_back(shard: str, tmp_path: Path, losses: Losses) -> None:
    hosts = Hosts(tmp_path, "localhost:1")
    options = ("-np", "1", "--elastic", "1:4", "--discover", str(hosts.script))
    job = Scenario(tmp_path, *options, train=[f"--parallel.shard={shard}"])
    with nothing_lost(job.run, losses), job:
        job.until("round 1: 1 rank(s) on 1 host(s)")
        hosts.are("localhost:1 127.0.0.1:1")
        job.until("round 2: 2 rank(s) on 2 host(s)")
        hosts.are("127.0.0.1:1")  # the one with rank 0 goes
        job.until("round 3: 1 rank(s) on 1 host(s)")
        hosts.are("localhost:1 127.0.0.1:1")
        job.until("round 4: 2 rank(s) on 2 host(s)")
        job.finish()
    steps = [line["step"] for line in read_journal(job.run / "journal.jsonl") if "event" not in line]
    assert len(steps) == len(set(steps)), "no step was done twice"


@pytest.mark.parametrize("fault", ["SIGKILL", EXCEPTION])
@pytest.mark.parametrize(
    ("elastic", "rank", "sizes"), [("1:2", 0, [2, 1, 2]), ("1:2", 1, [2, 1, 2]), ("2:2", 1, [2, 2])]
)
def test_a_rank_fails_and_the_others_continue_or_wait_for_another(
    elastic: str, rank: int, sizes: list[int], fault: str, tmp_path: Path, losses: Losses
) -> None:
    job = Scenario(tmp_path, "-np", "2", "--elastic", elastic, fault=fault, rank=rank)
    with nothing_lost(job.run, losses), job:
        if len(sizes) == 2:
            job.until("at least 2 are needed: waiting")
        job.until(f"round {len(sizes)}: 2 rank(s) on 1 host(s)")
        job.finish()
    assert job.sizes() == sizes, "\n".join(job.said)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_evaluation_in_which_a_rank_is_lost_is_made_up(rank: int, tmp_path: Path, losses: Losses) -> None:
    lost = {"fault": "SIGKILL", "phase": "evaluation", "step": 12, "rank": rank}
    job = Scenario(tmp_path, "-np", "2", "--elastic", "1:2", train=["--train.eval_every=5"], **lost)  # type: ignore[arg-type]
    with nothing_lost(job.run, losses), job:
        job.until("round 2: 1 rank(s)")
        job.finish()
    lines = read_journal(job.run / "journal.jsonl")
    assert [line["at_step"] for line in lines if line.get("event") == "evaluation"] == list(range(0, STEPS + 1, 5))


def test_a_rank_dies_while_the_others_meet(tmp_path: Path, losses: Losses) -> None:
    """Horovod as it comes is aborted then, on each of them."""
    hosts = Hosts(tmp_path, "localhost:2")
    elastic = ("-np", "2", "--elastic", "1:3", "--discover", str(hosts.script))
    job = Scenario(tmp_path, *elastic, fault="SIGKILL", phase=MEETING, step=2, rank=2)
    with nothing_lost(job.run, losses), job:
        job.until("round 1: 2 rank(s)")
        hosts.are("localhost:3")
        job.until("round 2: 3 rank(s)")
        job.until("rank 2 on localhost was killed by SIGKILL")
        job.until(": 3 rank(s)")
        job.finish()
    sizes = job.sizes()
    assert sizes in ([2, 3, 2, 3], [2, 3, 3]), "\n".join(job.said)  # a new rank may come before the next round


def test_a_host_with_wrong_bits_is_left_out(tmp_path: Path, losses: Losses) -> None:
    options = ("-np", "3", "--elastic", "1:3", "-H", "localhost:2,127.0.0.1:1")
    checked = ("--train.reproducible=bits", "--train.verify_every=1")
    job = Scenario(tmp_path, *options, fault=WRONG_BITS, rank=2, train=checked)
    with nothing_lost(job.run, losses), job:
        job.until("127.0.0.1 is left out for the rest of the job")
        job.until("round 2: 2 rank(s) on 1 host(s)")
        job.finish()
    (event,) = read_events(job.run / "journal.jsonl", "wrong_rank")
    assert (event["rank"], event["at_step"]) == (2, 12) and job.sizes() == [3, 2]


@pytest.mark.parametrize("hosts", [1, 2])
def test_all_ranks_or_hosts_fail_at_once_and_are_started_again(hosts: int, tmp_path: Path, losses: Losses) -> None:
    on_hosts = ("-H", "localhost:1,127.0.0.1:1") if hosts == 2 else ()
    job = Scenario(tmp_path, "-np", "2", "--elastic", "1:2", "--restarts", "1", *on_hosts)
    with nothing_lost(job.run, losses), job:
        job.until_step(25)
        if hosts == 1:
            job.kill_ranks()
        else:
            for agent in job.processes("hvdtrain.launch.agent"):
                agent.kill()
        job.until("the whole job restarts (1 of 1)")
        job.until(f"2 rank(s) on {hosts} host(s)")
        job.finish()


@pytest.mark.parametrize(
    ("elastic", "limit", "why"),
    [
        ("2:2", ("--elastic-timeout", "0.1"), "there are 1 of at least 2 ranks"),
        ("1:2", ("--reset-limit", "1"), "exceeds --reset-limit 1"),
    ],
)
def test_a_limit_ends_the_job_which_can_be_started_again(
    elastic: str, limit: tuple[str, str], why: str, tmp_path: Path, losses: Losses
) -> None:
    job = Scenario(tmp_path, "-np", "2", "--elastic", elastic, *limit, fault="SIGKILL", step=25)
    with job:
        assert job.end()[0] == 1
    assert any(why in line for line in job.said)
    with nothing_lost(job.run, losses), Scenario(tmp_path, "-np", "2", "--elastic", elastic) as again:
        again.finish()
