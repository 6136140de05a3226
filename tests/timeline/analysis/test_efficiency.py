"""From the peak of the devices to what the model uses of it, and what more ranks bring."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from hvdtrain.observe.past_journal import JournalStart
from hvdtrain.timeline.analysis.analyse import analyse
from hvdtrain.timeline.analysis.analysis import Efficiency, figures
from hvdtrain.timeline.analysis.goodput import scaling
from hvdtrain.timeline.report.page import to_html
from tests.support.step_tables import run_of, table_of

WORK_MS = 100.0
STEP_S = 0.101
"""With 1 ms of exchange."""


def _found(*, checkpointing: str = "none", peak: float | None = None, **flops: Any) -> Efficiency | None:
    peak = 16e12 / (0.4 * STEP_S) if peak is None else peak
    event = {"event": "flops", "per_sample": 1e12, "peak_per_s": peak, **flops}
    config = {"train": {"global_batch": 16}, "memory": {"checkpointing": checkpointing}}
    run = run_of(table_of(np.full((4, 60), WORK_MS)), config=config, start=JournalStart({}, events=[event]))
    found = analyse(run)
    assert found.efficiency is None or figures(found)["mfu"] == found.efficiency.mfu
    assert ('id="efficiency"' in to_html(found)) == (found.efficiency is not None)
    return found.efficiency


def test_shares_of_the_peak_sum_to_1() -> None:
    found = _found()
    assert found.mfu == pytest.approx(0.4)
    assert sum([found.mfu, *found.lost.values()]) == pytest.approx(1.0)
    assert found.lost["kernels below the peak"] == pytest.approx(0.85 / 1.01 - 0.4)
    assert found.lost["exposed communication"] == pytest.approx(0.01 / 1.01)
    assert found.lost["input"] == pytest.approx(0.05 / 1.01)
    again = _found(checkpointing="full")  # a second forward pass is a quarter of computing
    assert again.lost["recomputation"] == pytest.approx(0.85 / 1.01 / 4)
    assert sum([again.mfu, *again.lost.values()]) == pytest.approx(1.0)


@pytest.mark.parametrize("flops", [{"peak_per_s": None}, {"per_sample": None}, {"peak_per_s": 1e12}])
def test_without_a_credible_peak_there_is_none(flops: dict[str, Any]) -> None:
    assert _found(**flops) is None


def _start(size: int, step_s: float, steps: int = 40) -> JournalStart:
    return JournalStart({"size": size, "time": 0.0}, 1, steps, seconds=array("d", [step_s] * steps))


def test_a_device_is_compared_with_one_of_fewer() -> None:
    found = scaling([_start(2, 1.0), _start(8, 0.3)])
    assert (found.fewer, found.ranks) == (2, 8)
    assert found.efficiency == pytest.approx(2 * 1.0 / (8 * 0.3))
    assert scaling([_start(2, 1.0), _start(2, 0.9)]) is None
    assert scaling([_start(8, 0.3), _start(2, 1.0)]) is None, "the last has the fewest"
    assert scaling([_start(2, 1.0, 5), _start(8, 0.3)]) is None, "too few steps"
