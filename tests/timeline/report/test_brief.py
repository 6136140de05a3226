from __future__ import annotations

import re
from dataclasses import replace

import pytest

from hvdtrain.timeline.analysis.analysis import Analysis, Budget, Finding, OuterSteps
from hvdtrain.timeline.report.terminal import MOST_SUMMARY_LINES, summary_lines
from tests.support.analyses import about, analysis, budget, empty, hostile, parts


@pytest.mark.parametrize("of", [analysis(1), analysis(2), analysis(64, late=False), hostile(), empty()])
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


def test_it_names_the_late_rank_the_reason_and_the_fix() -> None:
    text = " ".join(line.strip() for line in summary_lines(analysis(8)))
    assert (
        "straggler: rank 3 on node-0 costs 12.3 ms per step [11.2 .. 13.4]: waits for data 11.2 ms a step more" in text
    )
    assert "finding: 25.9 ms of each step are spent sending gradients." in text
    assert "try: Send less: --parallel.compression powersgd:4" in text
    assert "exposed: waiting for late ranks" in text


def test_no_rank_is_named_without_evidence() -> None:
    text = " ".join(line.strip() for line in summary_lines(analysis(8, late=False)))
    assert "straggler: none: no rank costs more than 0.4 ms a step, which is less than the noise of 0.6 ms" in text
    assert "straggler: unknown: the file holds no ticks" in summary_lines(empty())
    assert summary_lines(empty())[-1] == "finding: none"


def test_ranks_of_ticks_have_no_host() -> None:
    late = analysis(8)
    blame = replace(late.blame, ranks=[replace(row, host="") for row in late.blame.ranks])
    text = "\n".join(summary_lines(replace(late, blame=blame)))
    assert "straggler: rank 3 costs" in text


def test_long_words_are_cut() -> None:
    found = Finding("x", "word " * 200, 1.0, "advice " * 200)
    assert len(summary_lines(replace(analysis(8), findings=[found]))) <= MOST_SUMMARY_LINES


def test_workers_that_train_apart_have_a_line() -> None:
    outer = OuterSteps("diloco:8", 2, 11, 4.2e6, 1.5, 0.5, 0.9)
    for of in (analysis(8), empty()):
        lines = summary_lines(replace(of, outer=outer))
        text = " ".join(line.strip() for line in lines)
        assert len(lines) <= MOST_SUMMARY_LINES
        assert "2 workers, diloco:8: 11 outer steps; in each 4.20 MB sent, 1.50 ms waited" in text
