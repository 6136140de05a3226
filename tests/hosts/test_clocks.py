"""Clocks of two hosts compared by collectives. Both are this machine: the true offset is 0."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from hvdtrain.timeline.steps import read_starts
from tests.support.step_tables import read_spans
from tests.support.two_hosts import OWN, TwoHosts

ROOT = Path(__file__).parents[2]
PROGRAM = """
import platform, sys
from hvdtrain.observe import span_trace
from hvdtrain.training.records import observers as stamps
span_trace.clock_id = stamps.clock_id = platform.node  # as if each had booted by itself
from hvdtrain.__main__ import main
raise SystemExit(main(sys.argv[1:]))
"""
TOY = [f"--task={ROOT}/tests/support/toy.py:toy", "--train.global_batch=8", "--train.micro_batch=2"]


def test_the_true_offset_is_within_the_stated_error(hosts: TwoHosts, tmp_path: Path) -> None:
    hosts.throttle("1gbit")
    argv = [sys.executable, "-c", PROGRAM, *TOY, "--train.steps=100", "--run_dir=run"]
    hosts.mpirun(argv, cwd=tmp_path, environment={"PYTHONPATH": str(ROOT)})
    (start,) = read_starts(tmp_path / "run/timeline")
    first = json.loads((tmp_path / "run/timeline/steps.jsonl").read_text().splitlines()[0])
    assert first["clock_ids"] == ["a", "b"] and len(start.clock_us) == 8
    assert (abs(start.offset_us) <= start.error_us).all()
    assert not start.offset_us[:, 0].any() and not start.error_us[:, 0].any()
    assert (start.error_us[:, 1] > 0).all() and start.error_us[:, 1].min() < 5000  # a busy core delays an exchange
    assert start.steps.clock_error_us[1] == start.error_us[1:, 1].max()
    ours, theirs = read_spans(tmp_path / "run/timeline")
    assert ours.clock_error_us == 0 < theirs.clock_error_us


def test_rank_0_gets_the_spans_of_a_host_that_does_not_share_the_run_folder(hosts: TwoHosts) -> None:
    run = OWN / "run"
    argv = [sys.executable, "-m", "hvdtrain", *TOY, "--train.steps=30", f"--run_dir={run}"]
    hosts.mpirun(argv, cwd=ROOT, environment={"PYTHONPATH": str(ROOT)})
    there, here = (
        host.run([sys.executable, "-c", f"print(open('{run}/timeline/spans-rank-1.json').read())"]).stdout
        for host in (hosts.b, hosts.a)
    )
    assert here == there and json.loads(here)[0]["args"]["name"] == "rank 1 on b"
