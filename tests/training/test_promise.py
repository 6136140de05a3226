"""The promise of a run's end: made once, broken by what slows it, with its cause and since when."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from hvdtrain.training.records.promise import Promise

STEPS, EVERY = 1500, 50


def _said(
    *,
    slow: Mapping[str, float] | None = None,
    pause_s: float = 0.0,
    evaluation_s: float = 4.0,
    noise: float = 0.03,
    steps: int = STEPS,
    since: int = 700,
    repeats: int = 0,
    growth: float = 0.0,
) -> tuple[list[str], list[dict[str, Any]], float]:
    """Run with something slower `since` a step; return what was said, the events, and when it ended.

    After step `since`, the `repeats` steps before it are repeated. Steps grow by the share `growth` over the run.
    """
    said, events = list[str](), list[dict[str, Any]]()
    promise = Promise(steps, EVERY, EVERY, said.append, events.append)
    generator, now, lasting = np.random.default_rng(1), 1.8e9, 0.0
    promise.write({"event": "started", "size": 2})
    promise.write({"event": "evaluation", "seconds": 4.0})
    for step in [*range(1, since + 1), *range(since - repeats + 1, steps + 1)]:
        late = step >= since
        lasting = 0.5 * lasting + generator.normal(0, noise)
        longer = (1 + lasting) * (1 + growth * step / steps)
        parts = {"forward_s": 0.3 * longer, "backward_s": 0.7 * longer}
        for name, more in (slow or {}).items():
            parts[name] += more * late
        now += sum(parts.values()) + pause_s * (step == since)
        promise.write({"step": step, "step_s": sum(parts.values()), "time": now, **parts})
        if step % EVERY == 0:
            now += 1.0 + (evaluation_s if late else 4.0)
            promise.write({"event": "evaluation", "seconds": evaluation_s if late else 4.0})
    return said, events, now


def test_a_steady_run_is_promised_once_and_ends_then() -> None:
    said, (event,), end = _said()
    assert len(said) == 1 and "the run ends at" in said[0]
    assert event["event"] == "promise" and event["low"] <= end <= event["high"]
    assert event["at_step"] < 100 and event["high"] - event["end"] < 0.1 * (end - 1.8e9)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"slow": {"forward_s": 0.4}}, "forward 4"),
        ({"slow": {"backward_s": 0.4}}, "backward 4"),
        ({"pause_s": 300.0}, "300 s more passed between steps"),
        ({"evaluation_s": 25.0}, "evaluations take"),
        ({"repeats": 400}, "400 steps were repeated after roll backs"),
        ({"slow": {"forward_s": 0.4}, "steps": 6000, "since": 4000}, "forward 4"),
    ],
)
def test_a_broken_promise_says_by_what_and_since_when(change: dict[str, Any], word: str) -> None:
    said, (first, second, *_), end = _said(**change)
    assert end > first["high"] and "does not hold" in said[1] and word in said[1]
    assert second["why"] in said[1] and second["at_step"] > 700 - change.get("repeats", 0)
    if "slow" in change:
        assert f"since step {change.get('since', 700):,}"[:-2] in said[1] and second["low"] <= end <= second["high"]


def test_steps_that_go_on_to_grow_break_few_promises() -> None:
    """What has slowed a run may go on: the next promise expects as much more again."""
    said, events, end = _said(growth=1.0, steps=6000)
    assert 2 < len(said) < 10 and events[-1]["low"] <= end <= events[-1]["high"], "else 20"


def test_other_ranks_make_a_promise_of_their_own() -> None:
    said = list[str]()
    promise = Promise(1000, 0, 0, said.append, lambda event: None)
    for start in (0, 500):
        promise.write({"event": "started", "size": 2})
        for step in range(start + 1, start + 500):
            promise.write({"step": step, "step_s": 1.0 + start, "time": 1.8e9 + step * (1.0 + start)})
    assert len(said) == 2 and all("the run ends at" in text for text in said)


def test_the_end_of_workers_apart_is_promised_by_whole_rounds() -> None:
    events, now = list[dict[str, Any]](), 1.8e9
    promise = Promise(3000, EVERY, EVERY, lambda text: None, events.append, round_steps=250)
    promise.write({"event": "started", "size": 2})
    promise.write({"event": "evaluation", "seconds": 0.0})
    for step in range(1, 3001):
        step_s = 61.0 if step % 250 == 0 else 1.0
        now += step_s
        promise.write({"step": step, "step_s": step_s, "time": now})
    assert len(events) == 1 and events[0]["low"] < now < events[0]["high"]
