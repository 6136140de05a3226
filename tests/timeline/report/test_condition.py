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
from hvdtrain.timeline.analysis.analysis import figures
from hvdtrain.timeline.report import condition
from tests.support.step_tables import run_of, table_of

FIGURES = {"step_ms": 20.0, "straggler_ms": 5.0, "exposed_share": 0.25}


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
    [
        "",
        "straggler_ms",
        "5 < straggler_ms",
        "straggler_ms > 5 or step_ms > 1",
        "straggler_ms > 5 and",
        "step_ms => 3",
        "step_ms > 2 * base",
        "step_ms > base",
    ],
)
def test_an_invalid_condition_is_reported(text: str) -> None:
    with pytest.raises(ConfigError, match="invalid --fail_if"):
        condition.parse(text)


def test_a_wrong_name_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean straggler_ms"):
        condition.parse("stragler_ms > 5")


@pytest.mark.parametrize("text", ["foo", "foo > 5"])
def test_a_name_that_is_like_no_other_gets_all_names_and_no_guess(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        condition.parse(text)
    assert caught.value.expected and all(name in caught.value.expected for name in condition.KNOWN)
    assert "did you mean" not in str(caught.value)


def test_what_a_run_does_not_say_is_no_zero() -> None:
    with pytest.raises(ConfigError, match="this run has no figure bus_gb_per_s"):
        condition.holds(condition.parse("bus_gb_per_s < 1"), FIGURES)
    with pytest.raises(ConfigError, match="this run has no figure straggler_ms"):
        condition.holds(condition.parse("straggler_ms > 1"), {"step_ms": 1.0})


@pytest.mark.parametrize("compare", [">", ">=", "<", "<=", "==", "!="])
def test_without_a_late_rank_conditions_on_it_are_false(compare: str) -> None:
    for text in (f"straggler_rank {compare} 1", f"step_ms > 1 and straggler_rank {compare} 1"):
        assert not condition.holds(condition.parse(text), {"step_ms": 20.0, "straggler_ms": 0.0})
    late = {"straggler_ms": 5.0, "straggler_rank": 1.0}
    assert condition.holds(condition.parse("straggler_rank == 1 and straggler_ms > 4"), late)
    with pytest.raises(ConfigError, match="this run has no figure straggler_rank"):
        condition.holds(condition.parse("straggler_rank == 1"), {"step_ms": 20.0})


@pytest.mark.parametrize("text", ["bus_gb_per_s < 1 and step_ms > 1e9", "step_ms > 1e9 and bus_gb_per_s < 1"])
def test_the_order_of_clauses_is_all_one(text: str) -> None:
    with pytest.raises(ConfigError, match="this run has no figure bus_gb_per_s"):
        condition.holds(condition.parse(text), FIGURES)


@given(st.text(max_size=60))
def test_any_text_is_a_condition_or_an_error_of_ours(text: str) -> None:
    with contextlib.suppress(ConfigError):
        condition.holds(condition.parse(text), FIGURES)


def test_every_figure_can_be_asked_for() -> None:
    run = run_of(table_of(np.random.default_rng(0).normal(20, 0.1, (2, 40))))
    known = set(figures(analyse(run)))
    parts = {f"{name.replace(' ', '_')}_ms" for name in (*budget.ORDER, budget.IDLE)}
    assert known | parts <= set(condition.KNOWN)
