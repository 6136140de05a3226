"""Conditions of --fail_if: read without running anything."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.errors import ConfigError
from hvdtrain.timeline.analysis import budget
from hvdtrain.timeline.analysis.analyse import analyse
from hvdtrain.timeline.analysis.analysis import figures as figures_of
from hvdtrain.timeline.report import condition
from tests.support.step_tables import run_of, table_of

FIGURES = {"step_ms": 20.0, "straggler_ms": 5.0, "exposed_share": 0.25, "fusion_copies_ms": 0.0}


@pytest.mark.parametrize(
    ("text", "met"),
    [
        ("straggler_ms > 4.9", True),
        ("straggler_ms>5", False),
        ("straggler_ms >= 5", True),
        ("straggler_ms == 5e0 and step_ms < 21", True),
        ("straggler_ms != 5", False),
        ("straggler_ms <= 5 and exposed_share > .3", False),
        ("fusion_copies_ms > 0", False),  # a part that this run does not have
    ],
)
def test_a_condition_holds_where_all_of_it_does(text: str, met: bool) -> None:
    assert condition.holds(condition.parse(text), FIGURES) is met


@pytest.mark.parametrize(
    "text",
    ["", "straggler_ms", "5 < straggler_ms", "straggler_ms > 5 or step_ms > 1", "straggler_ms > 5 and", "step_ms => 3",
     "step_ms > 2 * base", "step_ms > base"],
)  # fmt: skip
def test_an_invalid_condition_is_reported(text: str) -> None:
    with pytest.raises(ConfigError, match="--fail_if"):
        condition.parse(text)


@pytest.mark.parametrize("text", ["foo", "foo > 5", "stragler_ms > 5"])
def test_a_wrong_name_gets_the_nearest_or_all_names(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        condition.parse(text)
    named = "did you mean straggler_ms" in str(caught.value)
    assert named == text.startswith("str")
    assert named or all(name in str(caught.value.expected) for name in condition.KNOWN)


@pytest.mark.parametrize(
    ("text", "figures", "lacks"),
    [
        ("bus_gb_per_s < 1", FIGURES, "bus_gb_per_s"),
        ("step_ms > 1e9 and bus_gb_per_s < 1", FIGURES, "bus_gb_per_s"),
        ("straggler_ms > 1", {"step_ms": 1.0}, "straggler_ms"),
        ("straggler_rank == 1", {"step_ms": 20.0}, "straggler_rank"),
        ("transfer_ms > 5", FIGURES, "transfer_ms"),
    ],
)
def test_what_a_run_does_not_say_is_no_zero(text: str, figures: dict[str, float], lacks: str) -> None:
    with pytest.raises(ConfigError, match=f"no figure {lacks}"):
        condition.holds(condition.parse(text), figures)


@pytest.mark.parametrize("compare", [">", ">=", "<", "<=", "==", "!="])
def test_without_a_late_rank_conditions_on_it_are_false(compare: str) -> None:
    for text in (f"straggler_rank {compare} 1", f"step_ms > 1 and straggler_rank {compare} 1"):
        assert not condition.holds(condition.parse(text), {"step_ms": 20.0, "straggler_ms": 0.0})
    late = {"straggler_ms": 5.0, "straggler_rank": 1.0}
    assert condition.holds(condition.parse("straggler_rank == 1 and straggler_ms > 4"), late)


@given(st.text(max_size=60))
def test_any_text_is_a_condition_or_an_error_of_ours(text: str) -> None:
    with contextlib.suppress(ConfigError):
        condition.holds(condition.parse(text), FIGURES)


def test_every_figure_can_be_asked_for() -> None:
    run = run_of(table_of(np.random.default_rng(0).normal(20, 0.1, (2, 40))))
    known = set(figures_of(analyse(run)))
    parts = {f"{name.replace(' ', '_')}_ms" for name in (*budget.ORDER, budget.IDLE)}
    assert known | parts <= set(condition.KNOWN)
