"""Predictions for workers that train apart, and ways to exchange, compared by the time to a loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvdtrain.cli.timeline import main
from hvdtrain.plan.description import held
from hvdtrain.plan.gradients import Gradient
from hvdtrain.plan.plan import Plan, Ranks
from hvdtrain.timeline.whatif.evidence import Change, Evidence
from hvdtrain.timeline.whatif.outer_exchange import RarePrediction, plan_of, predict_rarely
from hvdtrain.timeline.whatif.predict import predict
from hvdtrain.timeline.whatif.read_run import read_evidence
from tests.support.whatif_run import MIB, run_folder

COMPUTE_S = 0.166
"""Of the made-up run: all its parts."""


@pytest.fixture
def evidence(tmp_path: Path) -> Evidence:
    return read_evidence(run_folder(tmp_path / "run", size=4, local_size=1, wait_ms=9.0, passes=2))


def rarely(evidence: Evidence, sync: str, gbit: float = 0.1, **change: Any) -> RarePrediction:
    asked = {"workers": 4, "outer_compression": "none", **change}
    return predict_rarely(evidence, Change(sync=sync, bandwidth_gbit=gbit, **asked))


def test_one_step_without_coding_sends_what_an_all_reduce_sends(evidence: Evidence) -> None:
    found = rarely(evidence, "diloco:1")
    assert found.sent_bytes == 2 * 8 * MIB * 3 / 4 + 512 * 4 * 2 * 3 / 4
    assert found.every_step_bytes == found.sent_bytes
    wire_s = predict(evidence, Change(bandwidth_gbit=0.1)).then.wire_s
    assert found.wire_s == pytest.approx(wire_s, rel=0.05)


def test_more_steps_and_a_faster_link_take_less_time(evidence: Evidence) -> None:
    rare = [rarely(evidence, f"diloco:{every}").step_s for every in (1, 2, 8, 32)]
    assert rare == sorted(rare, reverse=True) and rare[0] > rare[-1] > COMPUTE_S
    fast = [rarely(evidence, "diloco:8", gbit) for gbit in (0.01, 0.1, 1e6)]
    assert [each.step_s for each in fast] == sorted((each.step_s for each in fast), reverse=True)
    assert fast[-1].step_s == pytest.approx(fast[-1].inner_s + fast[-1].coding_s / 8, rel=1e-3)


def test_payloads_are_smaller_by_their_bits(evidence: Evidence) -> None:
    sent = [rarely(evidence, "diloco:8", outer_compression=name).sent_bytes for name in ("int8", "int4", "int2")]
    assert sent[0] / sent[1] == pytest.approx(2, rel=0.07) and sent[1] / sent[2] == pytest.approx(2, rel=0.07)
    assert sent[0] == pytest.approx(3 * 2 * MIB, rel=0.02)  # one payload to each of three others


def test_a_delay_hides_the_exchange(evidence: Evidence) -> None:
    hidden = rarely(evidence, "streaming:64", outer_compression="int4")
    assert hidden.plan.fragments == 4 and hidden.wire_s < hidden.plan.delay * hidden.inner_s
    assert hidden.exposed_s == hidden.coding_s
    whole = rarely(evidence, "diloco:64", outer_compression="int4")
    assert 4 * hidden.sent_bytes == pytest.approx(whole.sent_bytes, rel=0.01)
    slow = rarely(evidence, "streaming:64", 0.0001, outer_compression="int4")
    assert slow.exposed_s == pytest.approx(slow.coding_s + slow.wire_s - slow.plan.delay * slow.inner_s)


def test_ranks_that_serve_a_worker_together_exchange_inside(evidence: Evidence) -> None:
    two, four, eight = (rarely(evidence, "diloco:8", workers=workers) for workers in (2, 4, 8))
    assert two.inner_s > four.inner_s  # gradients between two hosts, at 0.1 Gbit/s
    assert eight.inner_s == pytest.approx(four.inner_s, rel=0.01)  # two workers a rank
    assert eight.sent_bytes == four.sent_bytes
    plans = [Plan(outer=plan_of(Change(sync="diloco:8", workers=workers))) for workers in (4, 8)]
    assert [held(plan, [Gradient("w", (3,))], Ranks(4, 1))[0].nbytes for plan in plans] == [12, 24]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--sync", "diloco:32"], "needs --parallel.workers"),
        (["--sync", "diloco:32", "--workers", "1"], "2 or more"),
        (["--sync", "diloco:32", "--workers", "9"], "only 8 micro-batch"),
        (["--sync", "often", "--workers", "2"], "invalid --parallel.sync"),
        (["--sync", "every_step", "--workers", "2"], "in each step"),
        (["--sync", "diloco:32", "--workers", "2", "--outer_compression", "int3"], "invalid --outer.compression"),
        (["--sync", "diloco:32", "--workers", "2", "--shard", "optimizer"], "is not for --engine"),
        (["--workers", "2"], "no effect without --sync"),
    ],
)
def test_what_cannot_be_predicted_is_refused(
    evidence: Evidence, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["whatif", str(evidence.path), "--bandwidth_gbit", "0.1", *options]) == 1
    captured = capsys.readouterr()
    assert said in captured.err and not captured.out
