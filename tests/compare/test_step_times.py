"""The step times of two runs compared."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from hvdtrain.__main__ import main
from hvdtrain.compare.comparison import Row
from hvdtrain.compare.step_times import step_rows
from hvdtrain.compare.view import is_significant
from hvdtrain.timeline.analysis.analyse import analyse
from hvdtrain.timeline.analysis.analysis import Analysis
from tests.support.gallery import Gallery
from tests.support.step_tables import Floats, noise, run_of, table_of
from tests.support.timelines import Turn, trace_of

TRACES = Path(__file__).parents[1] / "timeline/traces"


def _analysed(forward: float = 0.0, late: float = 0.0, seed: int = 0, ranks: int = 4) -> Analysis:
    more: Floats = np.full((ranks, 100), forward)
    more[1] += late
    work = 20 + noise(np.random.default_rng(seed), (ranks, 100), "gaussian", 0.3)
    return analyse(run_of(table_of(work, more_ms={"forward": more})))


def _compared(seed: int = 0, **b: Any) -> dict[str, Row]:
    return {row.figure: row for row in step_rows([_analysed(seed=seed), _analysed(seed=seed + 1000, **b)])}


def _changed(row: Row) -> bool:
    return is_significant(row.differences[1])


def test_a_changed_part_is_distinguished_from_noise() -> None:
    rows = _compared(forward=3.0)
    for name, within in (("step", 0.2), ("forward", 0.1)):
        found = rows[name].differences[1]
        assert _changed(rows[name]) and found and found.value == pytest.approx(3.0, abs=within)
    assert "late ranks" not in rows


def test_the_same_twice_is_noise_nearly_always() -> None:
    rows = [row for seed in range(20) for row in _compared(seed).values()]
    assert np.mean([_changed(row) for row in rows]) < 0.12


def test_a_late_rank_of_one_of_two_runs_is_reported() -> None:
    row = _compared(late=4.0)["late ranks"]
    assert _changed(row) and row.differences[1] and row.differences[1].value == pytest.approx(row.values[1])


def test_a_run_without_steps_is_left_out() -> None:
    rows = {row.figure: row for row in step_rows([_analysed(), None, _analysed(forward=3.0)])}
    assert rows["step"].values[1] is rows["step"].differences[1] is None and _changed_of(rows["step"], 2)
    assert not list(step_rows([None, _analysed()])) and not list(step_rows([_analysed(), None]))


def _changed_of(row: Row, column: int) -> bool:
    return is_significant(row.differences[column])


def test_a_run_without_a_timeline_is_compared_by_the_exchange_as_a_whole() -> None:
    table = table_of(20 + noise(np.random.default_rng(0), (2, 60), "gaussian", 0.3), exchange_ms=4.0)
    turns = [Turn("g", float(t), {"MPI_ALLREDUCE": 3000.0}) for t in table.ready_us.max(axis=0)[20:40]]
    runs = [run_of(table), run_of(table, horovod=[trace_of(turns)])]
    for a, b in (runs, runs[::-1]):
        rows = {row.figure: row for row in step_rows([analyse(a), analyse(b)])}
        assert "transfer" not in rows and not any(map(_changed, rows.values()))
        assert rows["exchange"].values == pytest.approx([4.0, 4.0])
    same = {row.figure for row in step_rows([analyse(runs[1]), analyse(runs[1])])}
    assert "transfer" in same and "exchange" not in same


def test_two_timelines_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    both = [str(TRACES / f"training{which}.json.gz") for which in ("", "-4-ranks-gloo")]
    assert main(["compare", *both]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"step +[\d.]+ +[\d.]+ [+-][\d.]+\*?\n", shown) and re.search(r"ranks +2 +4\n", shown)
    assert main(["compare", *both, "--json", "--fail_if", "step_ms > 0 * base and transfer_ms >= 0"]) == 1
    found = orjson.loads(capsys.readouterr().out)
    assert found["rows"][0]["figure"] == "step" and found["figures"][0]["step_ms"] > 0


def test_runs_are_compared_by_their_steps_too(gallery: Gallery, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(gallery["two"].run)
    assert main(["compare", run, run]) == 0
    shown = capsys.readouterr().out
    assert "milliseconds of a step" in shown and "  backward " in shown and "+0.0" in shown
