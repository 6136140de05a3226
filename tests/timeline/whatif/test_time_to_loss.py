"""Ways to exchange, compared by the time to a loss."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.timeline.whatif import time_to_loss
from hvdtrain.timeline.whatif.evidence import Change, Evidence
from hvdtrain.timeline.whatif.outer_exchange import predict_rarely
from hvdtrain.timeline.whatif.read_run import read_evidence
from hvdtrain.timeline.whatif.time_to_loss import MEASURED, Measured, compare_ways
from tests.support.whatif_run import run_folder
from tests.timeline.whatif.test_command import shown

COSTLY = Measured("diloco:8", "int8", "", 3.0, 2.0, 4.0)
CHEAP = Measured("diloco:8", "int4", "--outer.start_steps 9", 1.2, 1.1, 1.3)


@pytest.fixture
def evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Evidence:
    monkeypatch.setattr(time_to_loss, "MEASURED", (COSTLY, CHEAP))
    return read_evidence(run_folder(tmp_path / "run", size=4, local_size=1, wait_ms=9.0, passes=2))


def test_time_is_predicted_steps_times_measured_samples(evidence: Evidence) -> None:
    found = compare_ways(evidence, Change(bandwidth_gbit=0.01))
    step = predict_rarely(evidence, Change(sync="diloco:8", workers=4, outer_compression="int4", bandwidth_gbit=0.01))
    (way,) = [way for way in found.ways if way.name == "diloco:8, int4"]
    start_s = 0.25 * min(found.usual.step_s, *step.synchronous_s.values())
    of_steps = [start_s + 0.85 * step.low_s, start_s + 0.95 * step.step_s, start_s + 1.05 * step.high_s]
    assert [way.low_s, way.time_s, way.high_s] == pytest.approx(of_steps)
    assert [way.time_s for way in found.ways] == sorted(way.time_s for way in found.ways)
    assert found.best is way and found.workers == 4
    assert way.options == (
        "--parallel.sync diloco:8 --parallel.workers 4 --outer.compression int4 --outer.start_steps 9"
    )


def test_an_exchange_in_each_step_stays_unless_another_is_faster_beyond_doubt(evidence: Evidence) -> None:
    assert compare_ways(evidence, Change(bandwidth_gbit=10.0)).best.options == "--parallel.compression none"
    seen = set()
    for gbit in (0.05 * 1.4**power for power in range(12)):
        found = compare_ways(evidence, Change(bandwidth_gbit=gbit))
        (way,) = [way for way in found.ways if way.name == "diloco:8, int4"]
        seen.add((way.time_s < found.usual.time_s, way.high_s < found.usual.time_s))
        assert (found.best is way) == (way.high_s < found.usual.time_s)
    assert seen == {(True, True), (True, False), (False, False)}


def test_workers_are_the_hosts_or_the_ranks_of_one(evidence: Evidence) -> None:
    assert compare_ways(evidence, Change(size=8, ranks_per_host=4, bandwidth_gbit=0.1)).workers == 2
    assert compare_ways(evidence, Change(size=2, ranks_per_host=2)).workers == 2
    assert compare_ways(evidence, Change(workers=3, bandwidth_gbit=0.1)).workers == 3


def test_each_measured_way_is_valid_and_can_be_predicted(evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_to_loss, "MEASURED", MEASURED)
    assert len(compare_ways(evidence, Change(bandwidth_gbit=0.1)).ways) == 3 + len(MEASURED) > 4
    for way in MEASURED:
        assert 0.9 < way.low <= way.samples <= way.high


def test_text_and_json(evidence: Evidence, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["whatif", str(evidence.path), "--sync", "auto", "--bandwidth_gbit"]
    text, found = shown([*asked, "0.01"], capsys)
    assert found["best"]["options"] in text and found["change"]["sync"] == "auto"
    share = found["best"]["time_s"] / found["usual"]["time_s"]
    assert f"{share:.2f} [" in text and "in each step, int8" in text
    assert "use an exchange in each step" in shown([*asked, "10"], capsys)[0]
