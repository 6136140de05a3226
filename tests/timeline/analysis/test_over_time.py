"""The step time over a run: moments, marks, and the page's picture of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.observe.past_journal import JournalStart
from hvdtrain.spans import JOURNAL_KEYS
from hvdtrain.timeline.analysis.analyse import analyse
from hvdtrain.timeline.columns import JournalSteps
from hvdtrain.timeline.report.over_time_view import WIDTH, over_time_view
from hvdtrain.timeline.report.page import to_html
from hvdtrain.timeline.run import load
from tests.support.journals import FakeRun
from tests.support.step_tables import noise, run_of, table_of


def _history(steps: int) -> JournalSteps:
    parts = {name: np.full(steps, 9.0) for name in JOURNAL_KEYS}
    return JournalSteps(np.arange(1, steps + 1), np.linspace(85.0, 95.0, steps), parts, np.full(steps, np.nan))


def test_moments_sum_to_the_step_and_cover_the_run() -> None:
    work = 100 + noise(np.random.default_rng(0), (4, 400), "gaussian", 1.0)
    work[1, 200:] += 21.0
    start = JournalStart({"size": 4, "time": 0.0}, first_step=1)
    resumed = JournalStart({"size": 3, "time": 0.0}, first_step=301)
    found = analyse(run_of(table_of(work), history=_history(1000), starts=[start, resumed]))
    moments = found.over_time.moments
    assert len(moments) == 200 and (moments[0].first_step, moments[-1].last_step) == (1, 1000)
    for moment in moments:
        assert sum(moment.parts_ms.values()) == pytest.approx(moment.step_ms)
    kinds = {(mark.kind, mark.step): mark.text for mark in found.over_time.marks}
    assert kinds["start", 1] == "the run starts on 4 ranks" and kinds["start", 301] == "the run continues on 3 ranks"
    (turned,) = [mark for mark in found.over_time.marks if mark.kind == "straggler"]
    assert abs(turned.step - 201) <= 20 and turned.text.startswith("rank 1 becomes a straggler")
    view = over_time_view(found.over_time)
    assert [place["x"] for place in view["places"]][:2] == [0.0, WIDTH / 200]
    assert sum(place["width"] for place in view["places"]) == pytest.approx(WIDTH)
    assert [(band["x"], band["width"]) for band in view["bands"]] == [(0.3 * WIDTH, 0.7 * WIDTH)]
    page = to_html(found)
    assert 'id="over-time"' in page and page.count('class="place"') == 200 and "becomes a straggler" in page


def test_moments_tell_the_time_since_the_run_began(tmp_path: Path) -> None:
    """Between two starts the job waited for two hours."""
    history = _history(8)
    unknown = analyse(run_of(table_of(np.full((1, 8), 90.0)), history=history)).over_time
    assert {moment.after_s for moment in unknown.moments} == {None}
    assert over_time_view(unknown)["ticks"][0] == "step 1"
    time_s = 1.8e9 + np.cumsum(history.step_ms / 1e3) + np.where(history.step > 4, 7200.0, 0.0)
    found = analyse(run_of(table_of(np.full((1, 8), 90.0)), history=replace(history, time_s=time_s))).over_time
    after = [moment.after_s for moment in found.moments]
    assert after[:2] == pytest.approx([0.0, 0.085], abs=1e-4) and after[4] == pytest.approx(7200.35, abs=0.02)
    view = over_time_view(found)
    assert view["ticks"] == ["step 1, 0 s", "step 3, 0 s", "step 5, 2.0 h", "step 7, 2.0 h", "step 8"]
    assert view["places"][4]["text"].startswith("steps 5 to 5, from 2.0 h on")


def test_steps_that_a_later_start_repeated_are_those_of_the_later_one(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "a").start([1.0] * 40, step_s=5.0, end="").start([1.0] * 40, after=20, step_s=1.0)
    history = load(run.folder).history
    assert history.step.tolist() == list(range(1, 61))
    assert history.step_ms.tolist() == [5000.0] * 20 + [1000.0] * 40
    assert np.isfinite(history.time_s).all()
