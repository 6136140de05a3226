"""What is slow now: sentences that come and go while a run trains."""

from __future__ import annotations

import numpy as np

from hvdtrain.timeline.analysis.analyse import analyse
from hvdtrain.timeline.columns import Floats
from hvdtrain.timeline.verdicts import changed, verdicts
from tests.support.step_tables import noise, run_of, table_of


def _said(work: Floats) -> dict[str, str]:
    return verdicts(analyse(run_of(table_of(work))))


def test_a_verdict_comes_stays_and_goes() -> None:
    work = 100 + noise(np.random.default_rng(0), (4, 600), "gaussian", 1.0)
    work[1, 200:400] += 21.0
    before, during, later, after = (_said(work[:, :steps]) for steps in (150, 300, 390, 600))
    assert before == {} and after == {}
    assert list(during) == list(later) == ["rank 1"]
    assert during["rank 1"].startswith("rank 1 on host0 is slow since step 2") and "ms per step" in during["rank 1"]
    assert changed(before, during) == [during["rank 1"]] and changed(during, later) == []
    assert changed(later, after) == [f"no longer: {later['rank 1']}"]


def test_a_slow_host_is_one_verdict() -> None:
    work = 100 + noise(np.random.default_rng(0), (16, 320), "gaussian", 1.0)
    work[8:] += 8.0
    (text,) = _said(work).values()
    assert text.startswith("host host1 is slow")


def test_expensive_findings_are_verdicts() -> None:
    table = table_of(np.full((2, 60), 100.0), exchange_ms=60.0)
    found = verdicts(analyse(run_of(table)))
    assert list(found) == ["exposed"] and "exposed communication takes" in found["exposed"]
