"""Windows of steps: their steps, and invalid windows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.config.windows import ALL, OFF, Window, parse_window
from hvdtrain.errors import ConfigError

STEPS = st.integers(1, 10**6)


@given(STEPS, STEPS, STEPS)
def test_a_window_holds_its_first_and_last_step_and_those_between(a: int, b: int, step: int) -> None:
    first, last = sorted((a, b))
    window = parse_window(f"{first}:{last}", "x")
    assert window
    assert (step in window) == (first <= step <= last)
    assert window.is_over(step) == (step > last)
    assert first in window and last in window and first - 1 not in window and last + 1 not in window


@given(STEPS)
def test_all_holds_every_step_and_off_none(step: int) -> None:
    assert parse_window("all", "x") == ALL and step in ALL and not ALL.is_over(step)
    assert parse_window("off", "x") == OFF and step not in OFF and OFF.is_over(step)
    assert bool(ALL) and not OFF


def test_one_step_is_a_window() -> None:
    assert parse_window("7:7", "x") == Window(7, 7)


@pytest.mark.parametrize("text", ["", "0:5", "5:4", "5", "5:", ":5", "-1:5", "1:2:3", " 1:2", "1:2\n", "Off", "¹:2"])
def test_an_invalid_window_names_the_option_and_the_format(text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_window(text, "observe.timeline")
    message = str(raised.value)
    assert "--observe.timeline" in message and "FIRST:LAST" in message
    assert repr(text) in message
