"""Two runs compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest

from hvdtrain.compare.step_times import Comparison, compare, to_text
from hvdtrain.timeline.analysis.analyse import analyse
from hvdtrain.timeline.analysis.analysis import Analysis
from tests.support.step_tables import Floats, noise, run_of, table_of
from tests.support.timelines import Turn, trace_of


def _analysed(forward: float = 0.0, late: float = 0.0, seed: int = 0, ranks: int = 4) -> Analysis:
    more: Floats = np.full((ranks, 100), forward)
    more[1] += late
    work = 20 + noise(np.random.default_rng(seed), (ranks, 100), "gaussian", 0.3)
    return analyse(run_of(table_of(work, more_ms={"forward": more})))


def _compared(seed: int = 0, **b: Any) -> Comparison:
    common = {"optimizer": {"lr": 0.1}}
    options = [{**common, "run_dir": n, "parallel": {"compression": c}} for n, c in (("a", "none"), ("b", "fp16"))]
    return compare(_analysed(seed=seed), _analysed(seed=seed + 1000, **b), *options)


def test_a_changed_part_is_distinguished_from_noise() -> None:
    found = _compared(forward=3.0)
    rows = {row.name: row for row in found.rows}
    for name, within in (("step", 0.2), ("forward", 0.1)):
        assert not rows[name].is_noise and rows[name].difference.value == pytest.approx(3.0, abs=within)
    assert "late ranks" not in rows
    text = to_text(found)
    assert "* forward" in text and "--parallel.compression  none -> fp16" in text and "run_dir" not in text


def test_the_same_twice_is_noise_nearly_always() -> None:
    rows = [row for seed in range(20) for row in _compared(seed).rows]
    assert np.mean([not row.is_noise for row in rows]) < 0.12


def test_a_late_rank_of_one_of_two_runs_is_reported() -> None:
    (row,) = [row for row in _compared(late=4.0).rows if row.name == "late ranks"]
    assert not row.is_noise and row.difference.value == pytest.approx(row.b.value)


def test_unlike_sizes_are_said_and_json_holds_all() -> None:
    found = _compared(forward=1.0, ranks=2)
    assert any("a has 4 ranks, b has 2" in note for note in found.notes)
    plain = orjson.loads(orjson.dumps(found))
    assert [row["name"] for row in plain["rows"]] == [row.name for row in found.rows]
    assert plain["options"] == {"parallel.compression": ["none", "fp16"]}


def test_a_run_without_a_timeline_is_compared_by_the_exchange_as_a_whole() -> None:
    table = table_of(20 + noise(np.random.default_rng(0), (2, 60), "gaussian", 0.3), exchange_ms=4.0)
    turns = [Turn("g", float(t), {"MPI_ALLREDUCE": 3000.0}) for t in table.ready_us.max(axis=0)[20:40]]
    runs = [run_of(table), run_of(table, horovod=[trace_of(turns)])]
    for a, b in (runs, runs[::-1]):
        rows = {row.name: row for row in compare(analyse(a), analyse(b), {}, {}).rows}
        assert "transfer" not in rows and all(row.is_noise for row in rows.values())
        assert rows["exchange"].a.value == pytest.approx(rows["exchange"].b.value) == 4.0
    same = {row.name for row in compare(analyse(runs[1]), analyse(runs[1]), {}, {}).rows}
    assert "transfer" in same and "exchange" not in same


def test_options_of_what_has_no_config_are_not_known() -> None:
    compared = compare(_analysed(), _analysed(), {}, {"seed": 1})
    assert "options: unknown" in to_text(compared) and compared.options is None
