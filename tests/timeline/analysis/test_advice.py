"""Advice is given where a what-if predicts a gain, and says how much."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.timeline.analysis.analyse import analyse
from hvdtrain.timeline.analysis.analysis import Finding
from hvdtrain.timeline.run import load
from hvdtrain.timeline.whatif.evidence import Change
from hvdtrain.timeline.whatif.predict import predict
from hvdtrain.timeline.whatif.read_run import read_evidence
from tests.support.whatif_run import GBIT, run_folder

FAST = [(1024, 1e-5), (1 << 20, 1e-4), (1 << 23, 8e-4)]


def _exposed(path: Path, **folder: Any) -> Finding:
    (found,) = [f for f in analyse(load(run_folder(path, size=2, steps=40, **folder))).findings if f.kind == "exposed"]
    return found


def _predicted_ms(advice: str) -> float:
    (found,) = re.findall(r"predicted: ([\d.]+) ms less per step", advice)
    return float(found)


def test_compression_is_advised_with_its_gain(tmp_path: Path) -> None:
    found = _exposed(tmp_path / "run", wait_ms=200.0, link=GBIT)
    assert found.advice.startswith("send less: --parallel.compression auto")
    evidence = read_evidence(tmp_path / "run")
    best = min(predict(evidence, Change(compression=name)).then.step_s for name in ("fp16", "int8", "powersgd:4"))
    assert _predicted_ms(found.advice) == pytest.approx(1e3 * (evidence.step_s - best), rel=0.03)


@pytest.mark.parametrize("options", [{"tp": 2}, {"cp": 2}])
def test_what_a_mesh_does_not_support_is_not_advised(tmp_path: Path, options: dict[str, int]) -> None:
    parallel = {"compression": "none", **options}
    found = _exposed(tmp_path / "run", wait_ms=200.0, link=GBIT, options={"parallel": parallel})
    assert found.advice.startswith("send less: --parallel.compression bf16 (predicted")
    (tmp_path / "run" / "timeline" / "gradients.json").unlink()
    (again,) = [f for f in analyse(load(tmp_path / "run")).findings if f.kind == "exposed"]
    assert "auto" not in again.advice


def test_compression_is_not_advised_where_little_time_goes_into_sending(tmp_path: Path) -> None:
    """The link explains 1 ms of the wait; with no prediction the same advice would be given."""
    found = _exposed(tmp_path / "run", wait_ms=60.0, local_size=2, link=FAST)
    assert "compression" not in found.advice and "a faster link" in found.advice
    (tmp_path / "run" / "timeline" / "gradients.json").unlink()
    again = [f for f in analyse(load(tmp_path / "run")).findings if f.kind == "exposed"]
    assert "--parallel.compression auto" in again[0].advice and "predicted" not in again[0].advice


def test_no_gain_is_larger_than_the_cost(tmp_path: Path) -> None:
    """A late rank hides most of what the exchange would take; the model says more."""
    found = _exposed(tmp_path / "run", wait_ms=200.0, late_ms=190.0, link=GBIT)
    assert found.cost_ms == pytest.approx(10.0, rel=0.01)
    assert _predicted_ms(found.advice) == pytest.approx(10.0, rel=0.01)


@pytest.mark.parametrize("changed", [False, True])
def test_steps_before_another_compression_was_chosen_say_nothing(tmp_path: Path, changed: bool) -> None:
    path = run_folder(tmp_path / "run", size=2, steps=40, wait_ms=200.0, link=GBIT)
    journal = path / "journal.jsonl"
    chosen = '{"event": "compression_chosen", "at_step": 30, "compression": "none"}\n'
    journal.write_text(
        journal.read_text().replace('"exposed_comm_s": 0.2', '"exposed_comm_s": 9.0', 30 if changed else 0) + chosen
    )
    evidence = load(path).evidence()
    assert evidence.parts_s["wait"] == pytest.approx(0.2)


def test_an_earlier_start_has_no_prediction(tmp_path: Path) -> None:
    """Its options and gradients are those of a later one."""
    path = run_folder(tmp_path / "run", size=2, steps=40, wait_ms=200.0, link=GBIT)
    assert load(path).evidence() is not None
    with (path / "journal.jsonl").open("a") as journal:
        journal.write('{"event": "started", "size": 2}\n')
    assert load(path).evidence() is None
