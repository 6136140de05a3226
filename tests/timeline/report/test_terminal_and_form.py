"""What a terminal shows and what JSON holds of an analysis."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import orjson
import pytest

from hvdtrain.timeline.analysis.analyse import analyse
from hvdtrain.timeline.analysis.analysis import Analysis, Budget, Finding, figures
from hvdtrain.timeline.report.form import dumped, schema, to_bytes
from hvdtrain.timeline.report.terminal import MOST_SUMMARY_LINES, summary_lines, to_text
from tests.support import analyses
from tests.support.step_tables import noise, run_of, table_of
from tests.support.timelines import Turn, trace_of


def _all() -> Iterator[Analysis]:
    work = 20 + noise(np.random.default_rng(0), (4, 100), "gaussian", 0.1)
    late = np.zeros_like(work)
    late[2] = 2.0
    yield analyse(run_of(table_of(work)))
    yield analyse(run_of(table_of(work, more_ms={"data": late}, error_us=np.inf)))
    yield analyse(run_of(table_of(work, more_ms={"data": late})))
    yield analyse(run_of(table_of(work[:1])))
    yield analyse(run_of(table_of(work[:, :1])))
    turns = [Turn(f"t{i}", 1e3 * step, {"MPI_ALLREDUCE": 100.0}, 40) for step in range(9) for i in range(3)]
    alone = replace(run_of(table_of(work)), steps=None, size=0)
    yield analyse(alone)
    yield analyse(replace(alone, horovod=[trace_of(turns)]))
    yield from (analyses.analysis(64), analyses.hostile(), analyses.empty())


ALL = [*_all()]
LATE = ALL[2]


@pytest.mark.parametrize("analysis", ALL)
def test_json_is_as_the_schema_says(analysis: Analysis) -> None:
    form = orjson.loads(to_bytes(analysis))
    jsonschema.Draft202012Validator.check_schema(schema())
    jsonschema.Draft202012Validator(schema()).validate(form)
    assert form["figures"] == pytest.approx(figures(analysis))


def test_a_name_that_is_no_text_costs_no_report() -> None:
    name = os.fsdecode(b"run-\xff")
    form = orjson.loads(to_bytes(replace(ALL[0], title=name)))
    assert form["title"] == "run-?"
    assert orjson.loads(dumped({name: [{name: name}]})) == {"run-?": [{"run-?": "run-?"}]}


def test_a_folder_has_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some run" / "timeline").mkdir(parents=True)
    (tmp_path / "latest").symlink_to("some run")
    monkeypatch.chdir(tmp_path / "some run" / "timeline")
    for path, title in ((Path(".."), "some run"), (Path(), "timeline"), (tmp_path / "latest", "latest")):
        run = replace(run_of(table_of(np.full((2, 40), 20.0))), path=path)
        assert analyse(run).title == title


def test_the_schema_refuses_what_is_something_else() -> None:
    good = orjson.loads(to_bytes(ALL[0]))
    validator = jsonschema.Draft202012Validator(schema())
    for name in good:
        assert not validator.is_valid({key: value for key, value in good.items() if key != name}), name
    assert not validator.is_valid({**good, "more": 1})
    assert not validator.is_valid({**good, "version": 2})


def _worst() -> Analysis:
    """Many ranks with every possible finding."""
    long, blame = "a name that does not end " * 20, LATE.blame
    causes = {row.rank: list(blame.causes.get(2, ())) * 4 for row in blame.ranks}
    findings = [replace(finding, text=long, advice=long) for finding in LATE.findings] * 8
    blame = replace(blame, late=[row.rank for row in blame.ranks], causes=causes)
    return replace(LATE, blame=blame, findings=findings, warnings=[long] * 30, notes=[long] * 30, title=long)


@pytest.mark.parametrize("analysis", [*ALL, _worst()])
def test_the_terminal_shows_forty_lines_at_most(analysis: Analysis) -> None:
    lines = to_text(analysis).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 120


LONG = replace(analyses.analysis(8), findings=[Finding("x", "word " * 200, 1.0, "advice " * 200)])


@pytest.mark.parametrize("of", [*ALL, analyses.analysis(1), LONG])
def test_a_summary_is_short(of: Analysis) -> None:
    lines = summary_lines(of)
    assert 0 < len(lines) <= MOST_SUMMARY_LINES
    assert all("\n" not in line for line in lines)


def test_parts_of_a_summary_sum_to_the_step() -> None:
    many = {f"part {n}": float(n) for n in range(1, 15)}
    found = Budget("rank 0", analyses.about(sum(many.values())), 7, analyses.parts(many), [])
    for each in (found, analyses.budget(8)):
        lines = summary_lines(replace(analyses.analysis(8), budget=each))
        step = float(re.findall(r"step time: ([\d.]+) ms", lines[0])[0])
        shown = [float(ms) for line in lines for ms in re.findall(r"^  .*?([\d.]+) ms +[\d.]+%", line)]
        assert step == pytest.approx(each.step_ms.value) == pytest.approx(sum(shown), abs=0.5)


def _text(of: Analysis) -> str:
    return " ".join(line.strip() for line in summary_lines(of))


def test_a_summary_names_the_late_rank_the_reason_and_the_fix() -> None:
    of = analyses.analysis(8)
    text, (first, *_) = _text(of), of.findings
    assert "straggler: rank 3 on node-0 costs 12.3 ms" in text and first.text in text and first.advice in text
    assert "rank 2" in to_text(LATE) and "waits 3.00 ms per step for data" in to_text(LATE)
    quiet = analyses.analysis(8, late=False)
    assert f"straggler: none: {quiet.blame.reason}" in _text(quiet)
    assert _text(analyses.empty()) == f"straggler: unknown: {analyses.empty().blame.reason} finding: none"
