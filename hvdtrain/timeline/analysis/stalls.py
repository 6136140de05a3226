"""Stalled steps, from the journal, which has every step. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hvdtrain.observe.past_journal import JournalStart
from hvdtrain.timeline.analysis.rank_steps import start_up_steps

_STALL = 10.0
"""Times a usual step."""


def stalled(start: JournalStart) -> NDArray[np.bool_]:
    """Return which steps took so much longer than usual ones that they stalled, after the start-up [lines].

    The steps in which workers that train apart exchange are none.
    """
    seconds = np.array(start.seconds)
    if not len(seconds):
        return np.zeros(0, bool)
    outer = [event["at_step"] for event in start.events_named("outer_step") if isinstance(event.get("at_step"), int)]
    later = np.arange(len(seconds)) >= start_up_steps(seconds)
    return np.asarray(later & (seconds > _STALL * np.median(seconds)) & ~np.isin(start.steps, outer))


def stalls_of(start: JournalStart) -> dict[int, float]:
    """Return by how much longer than a usual step each stalled step took, ms."""
    mine, ms = stalled(start), 1e3 * np.array(start.seconds)
    more = ms[mine] - np.median(ms) if mine.any() else ms[mine]
    return dict(zip(np.array(start.steps)[mine].tolist(), more.tolist(), strict=True))
