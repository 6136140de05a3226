"""`--parallel.compression auto` between two hosts: one job, and the link decides what it is trained with."""

from __future__ import annotations

import sys
from pathlib import Path

from hvdtrain.observe.past_journal import read_steps
from tests.support.journals import read_events
from tests.support.two_hosts import TwoHosts

ROOT = Path(__file__).parents[2]
# 3.2 MB of gradients, and passes so long that it is nothing beside them where the link is as fast as memory.
JOB = [
    *(f"--task={ROOT}/tests/support/toy.py:toy", "--hidden=100000", "--optimizer.lr=1e-5"),
    *("--train.global_batch=200", "--train.micro_batch=100", "--train.steps=20", "--parallel.compression=auto"),
    "--observe.stall_timeout_s=60",  # ranks that choose unlike wait for one another
    "--observe.timeline=off",  # its probe of the link would be counted among what gradients send
]
STOP_AT = "--train.stop_at=8"  # the choice is made at step 7
SLOW, SLOW_BYTES_PER_S = "25mbit", 25e6 / 8


def _train(hosts: TwoHosts, run: Path, *options: str) -> None:
    argv = [sys.executable, "-m", "hvdtrain", *JOB, f"--run_dir={run}", *options]
    hosts.mpirun(argv, cwd=ROOT, environment={"PYTHONPATH": str(ROOT)})


def test_a_slow_link_gets_a_compression_that_a_resumed_run_keeps(hosts: TwoHosts, tmp_path: Path) -> None:
    run = tmp_path / "run"
    hosts.throttle(SLOW)
    _train(hosts, run, STOP_AT)
    (found,) = read_events(run, "compression_chosen")
    predicted_s = found["predicted_step_s"]
    gradient_bytes = 4 * read_events(run, "started")[0]["parameters"]
    assert found["compression"] != "none"
    assert predicted_s[found["compression"]] < predicted_s["none"] == found["step_s"]
    assert 0 < found["bytes_per_s"] < SLOW_BYTES_PER_S * 4, "far below the unlimited link"
    # of two ranks each sends the gradients once, which the link does not let through any sooner
    assert found["exposed_s"] > gradient_bytes / SLOW_BYTES_PER_S / 2

    hosts.throttle(None)  # were it to look again, it would find that nothing pays
    before = [host.sent_bytes() for host in (hosts.a, hosts.b)]
    _train(hosts, run)
    steps = read_steps(run / "journal.jsonl")
    sent = [host.sent_bytes() - b for host, b in zip((hosts.a, hosts.b), before, strict=True)]
    assert sorted(steps) == list(range(1, 21))
    assert [e["step"] for e in read_events(run, "resumed")] == [8]
    assert read_events(run, "compression_chosen") == [found]
    plain_bytes = 12 * gradient_bytes
    assert plain_bytes / 8 < sent[1] < 0.75 * plain_bytes, "rank 1 has no state to hand on: its gradients"
    assert sent[0] - sent[1] < 6 * gradient_bytes, "rank 0 hands on weights, two moments, the residuals of both ranks"
