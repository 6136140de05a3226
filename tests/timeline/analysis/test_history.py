"""The step time over a run: its start-up, stretches in which all ranks were slower, moments and marks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdtrain.observe.past_journal import JournalStart
from hvdtrain.spans import JOURNAL_KEYS
from hvdtrain.timeline.analysis.analyse import analyse
from hvdtrain.timeline.analysis.analysis import Analysis, Finding
from hvdtrain.timeline.columns import Floats, JournalSteps
from hvdtrain.timeline.report.form import to_bytes
from hvdtrain.timeline.report.page import to_html
from hvdtrain.timeline.report.page_view import WIDTH, over_time_view
from hvdtrain.timeline.run import load
from tests.support.journals import FakeRun
from tests.support.step_tables import noise, run_of, table_of

STEPS = 400


def _journal(forward: Floats, tokens: Floats | None = None) -> JournalSteps:
    count = len(forward)
    parts = {name: np.full(count, 10.0) for name in JOURNAL_KEYS}
    parts["forward"] = forward
    whole = np.sum([*parts.values()], axis=0)
    return JournalSteps(np.arange(1, count + 1), whole, parts, np.full(count, 512.0) if tokens is None else tokens)


def _forward(count: int = STEPS, seed: int = 0, scale: float = 1.0) -> Floats:
    return 30.0 + noise(np.random.default_rng(seed), (1, count), "heavy", scale)[0]


def _work(count: int = STEPS) -> Floats:
    return 100 + noise(np.random.default_rng(1), (4, count), "gaussian", 0.5)


def _analysed(
    forward: Floats, *, slow: Any = (), work: Floats | None = None, tokens: Floats | None = None, **more: Any
) -> Analysis:
    """A run whose `slow` steps take 25 ms longer."""
    forward[slow] += 25.0
    table = table_of(_work(len(forward)) if work is None else work)
    return analyse(run_of(table, journal=_journal(forward, tokens), **more))


def _found(analysis: Analysis, kind: str) -> list[Finding]:
    return [finding for finding in analysis.findings if finding.kind == kind]


@pytest.mark.parametrize(
    ("slow", "when", "share"),
    [
        (np.s_[200:], "since step 201", 0.5),
        (np.s_[:120], "until step 120", 0.3),
        (np.s_[100:200], "in steps 101 to 200", 0.25),
    ],
)
def test_all_ranks_slower_for_a_while_are_a_finding_with_the_moment(slow: slice, when: str, share: float) -> None:
    found = _analysed(_forward(), slow=slow)
    to_bytes(found)
    (finding,) = _found(found, "change")
    said = int(finding.text.split(":")[0].split()[-1])
    assert when.split()[0] in finding.text.split(":")[0] and abs(said - int(when.split()[-1])) <= 0.05 * STEPS
    assert finding.cost_ms == pytest.approx(25.0 * share, rel=0.2)
    assert "(forward 2" in finding.text and "backward" not in finding.text


def test_what_coincided_is_said() -> None:
    tokens = np.where(np.arange(STEPS) < 200, 512.0, 700.0)
    start = JournalStart({}, events=[{"event": "config_changed", "at_step": step} for step in (199, 300)])
    found = _analysed(_forward(), slow=np.s_[200:], tokens=tokens, start=start)
    (finding,) = _found(found, "change")
    assert "700 tokens instead of 512" in finding.text and "changed at step 199" in finding.text


@pytest.mark.parametrize("known", [True, False])
def test_clocks_of_gpus_that_fell_are_said_if_they_are_known(known: bool) -> None:
    table = table_of(_work())
    for block, facts in enumerate(table.facts):
        clock = [0.0] * 4 if not known else [1400.0 if block < 4 else 1100.0] * 4
        facts.update(gpu_clock_mhz=clock, gpu_temperature_c=[None] * 4)  # type: ignore[attr-defined]
    forward = _forward()
    forward[200:] += 25.0
    (finding,) = _found(analyse(run_of(table, journal=_journal(forward))), "change")
    assert ("1,100 MHz instead of 1,400" in finding.text) == ("GPUs" in finding.text) == known


def test_a_rank_that_turned_slow_is_the_reason_and_no_other_finding() -> None:
    work = _work()
    work[0, 200:] += 25.0
    found = _analysed(_forward(), slow=np.s_[200:], work=work)
    assert found.blame.late == [0] and not _found(found, "change")


@pytest.mark.parametrize("seed", range(10))
def test_noise_and_small_changes_are_no_finding(seed: int) -> None:
    forward = _forward(seed=seed, scale=8.0)
    forward[200:] += 2.0
    assert not _analysed(forward).changes


def test_a_start_up_is_a_cost_of_its_own() -> None:
    forward, work, slow = _forward(60), _work(60), [0, 1, 2, 4, 5]
    forward[slow] += 5000.0
    work[:, slow] += 5000.0
    found = _analysed(forward, work=work)
    (finding,) = _found(found, "start_up")
    assert "first 6 steps took 25.0 s longer" in finding.text
    assert finding.cost_ms == pytest.approx(25_000 / 60, rel=0.02)
    assert found.budget.step_ms.value == pytest.approx(101.3, rel=0.01)
    assert not found.changes
    for few in (_forward(60), np.append(130.0, _forward(59))):
        assert not _found(_analysed(few), "start_up")


def test_pauses_in_the_first_steps_are_no_start_up() -> None:
    forward = _forward(200)
    forward[[10, 30]] += 5000.0
    assert _analysed(forward).start_up is None


def test_moments_sum_to_the_step_and_cover_the_run() -> None:
    work = 100 + noise(np.random.default_rng(0), (4, 400), "gaussian", 1.0)
    work[1, 200:] += 21.0
    start = JournalStart({"size": 4, "time": 0.0}, first_step=1)
    resumed = JournalStart({"size": 3, "time": 0.0}, first_step=301)
    history = replace(_journal(np.full(1000, 1.0)), step_ms=np.linspace(85.0, 95.0, 1000))  # of which 81 are parts
    found = analyse(run_of(table_of(work), history=history, starts=[start, resumed]))
    moments = found.over_time.moments
    assert len(moments) == 200 and (moments[0].first_step, moments[-1].last_step) == (1, 1000)
    for moment in moments:
        assert sum(moment.parts_ms.values()) == pytest.approx(moment.step_ms)
    kinds = {(mark.kind, mark.step): mark.text for mark in found.over_time.marks}
    assert kinds["start", 1] == "the run starts on 4 ranks" and kinds["start", 301] == "the run continues on 3 ranks"
    (turned,) = [mark for mark in found.over_time.marks if mark.kind == "straggler"]
    assert abs(turned.step - 201) <= 20 and turned.text.startswith("rank 1 becomes a straggler")
    edges = over_time_view(found.over_time)["edges"]
    assert len(edges) == 201 and edges[0] == 0.0 and edges[-1] == WIDTH and edges == sorted(edges)
    page = to_html(found)
    assert 'id="over-time"' in page and page.count('class="place"') == 200 and "becomes a straggler" in page


def test_moments_tell_the_time_since_the_run_began() -> None:
    """Between two starts the job waited for two hours."""
    history = _journal(np.full(8, 5.0))
    unknown = analyse(run_of(table_of(np.full((1, 8), 90.0)), history=history)).over_time
    assert {moment.after_s for moment in unknown.moments} == {None}
    time_s = 1.8e9 + np.cumsum(history.step_ms / 1e3) + np.where(history.step > 4, 7200.0, 0.0)
    found = analyse(run_of(table_of(np.full((1, 8), 90.0)), history=replace(history, time_s=time_s)))
    after = [moment.after_s for moment in found.over_time.moments]
    assert after[:2] == pytest.approx([0.0, 0.085], abs=1e-4) and after[4] == pytest.approx(7200.35, abs=0.02)
    assert "<span>step 5, 2.0 h</span>" in to_html(found)


def test_steps_that_a_later_start_repeated_are_those_of_the_later_one(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "a").start([1.0] * 40, step_s=5.0, end="").start([1.0] * 40, after=20, step_s=1.0)
    history = load(run.folder).history
    assert history.step.tolist() == list(range(1, 61))
    assert history.step_ms.tolist() == [5000.0] * 20 + [1000.0] * 40
    assert np.isfinite(history.time_s).all()
