"""A host with late ranks is named as one, by a real job on two hosts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hvdtrain.timeline.analysis.analyse import analyse
from hvdtrain.timeline.run import load
from tests.support.two_hosts import TwoHosts

ROOT = Path(__file__).parents[2]
SLEEPER = [
    *(f"--task={ROOT}/tests/support/sleeper.py:sleeper", "--step_ms=150", "--late_ms=150", "--late_in=two"),
    *("--train.steps=40", "--train.global_batch=4", "--train.micro_batch=1", "--checkpoint.every=0"),
]


@pytest.mark.flaky(reruns=2)
def test_a_host_with_late_ranks_is_named(hosts: TwoHosts, tmp_path: Path) -> None:
    """By how much it is late is measured by benchmarks/straggler.py: these four ranks share two cores."""
    argv = [sys.executable, "-m", "hvdtrain", *SLEEPER, "--late_rank=2", f"--run_dir={tmp_path / 'run'}"]
    hosts.mpirun(argv, per_host=2, cwd=ROOT, environment={"PYTHONPATH": str(ROOT)})
    analysis = analyse(load(tmp_path / "run"))
    assert sorted(analysis.blame.late) == [2, 3], analysis.blame.reason
    (finding,) = [each for each in analysis.findings if each.kind == "straggler"]
    assert finding.text.startswith("host b with ranks 2, 3 is slow"), finding.text
    assert "mostly by forward" in finding.text and "hvdtrain doctor on b" in finding.advice
