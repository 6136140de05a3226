from __future__ import annotations

import re
from dataclasses import replace

import pytest

from hvdtrain.timeline.analysis.analysis import Analysis, Budget, Finding, OuterSteps
from hvdtrain.timeline.report.terminal import MOST_SUMMARY_LINES, summary_lines
from tests.support.analyses import about, analysis, budget, empty, hostile, parts

LONG = replace(analysis(8), findings=[Finding("x", "word " * 200, 1.0, "advice " * 200)])


@pytest.mark.parametrize("of", [analysis(1), analysis(2), analysis(64, late=False), hostile(), empty(), LONG])
def test_it_is_short(of: Analysis) -> None:
    lines = summary_lines(of)
    assert 0 < len(lines) <= MOST_SUMMARY_LINES
    assert all("\n" not in line for line in lines)


def test_its_parts_sum_to_the_step() -> None:
    many = {f"part {n}": float(n) for n in range(1, 15)}
    found = Budget("rank 0", about(sum(many.values())), 7, parts(many), [])
    for each in (found, budget(8)):
        lines = summary_lines(replace(analysis(8), budget=each))
        step = float(re.findall(r"step time: ([\d.]+) ms", lines[0])[0])
        shown = [float(ms) for line in lines for ms in re.findall(r"^  .*?([\d.]+) ms +[\d.]+%", line)]
        assert step == pytest.approx(each.step_ms.value) == pytest.approx(sum(shown), abs=0.5)


def _text(of: Analysis) -> str:
    return " ".join(line.strip() for line in summary_lines(of))


def test_it_names_the_late_rank_the_reason_and_the_fix() -> None:
    of = analysis(8)
    text, (first, *_) = _text(of), of.findings
    assert "straggler: rank 3 on node-0 costs 12.3 ms per step [11.2 .. 13.4]: waits for data" in text
    assert first.text in text and first.advice in text and "exposed: waiting for late ranks" in text
    ticks = replace(of.blame, ranks=[replace(row, host="") for row in of.blame.ranks])
    assert "straggler: rank 3 costs" in _text(replace(of, blame=ticks))
    quiet = analysis(8, late=False)
    assert f"straggler: none: {quiet.blame.reason}" in _text(quiet)
    assert _text(empty()) == f"straggler: unknown: {empty().blame.reason} finding: none"


def test_workers_that_train_apart_have_a_line() -> None:
    outer = OuterSteps("diloco:8", 2, 11, 4.2e6, 1.5, 0.5, 0.9)
    for of in (analysis(8), empty()):
        found = replace(of, outer=outer)
        assert len(summary_lines(found)) <= MOST_SUMMARY_LINES
        assert "2 workers, diloco:8: 11 outer steps; in each 4.20 MB sent, 1.50 ms waited" in _text(found)
