"""Stalled steps, from the journal, which has every step. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hvdtrain.observe.past_journal import JournalStart
from hvdtrain.timeline.analysis.analysis import Stalls
from hvdtrain.timeline.analysis.rank_steps import start_up_steps
from hvdtrain.timeline.analysis.stragglers import Stragglers

_STALL = 10.0
"""Times a usual step."""
_MOSTLY = 0.5
"""Of the stalled steps with stamps."""


def stalled(start: JournalStart) -> NDArray[np.bool_]:
    """Return which steps of a start took so much longer than usual ones that they stalled, after the start-up [lines].

    The steps in which workers that train apart exchange are none.
    """
    seconds = np.array(start.seconds)
    if not len(seconds):
        return np.zeros(0, bool)
    outer = [event["at_step"] for event in start.events_named("outer_step") if isinstance(event.get("at_step"), int)]
    later = np.arange(len(seconds)) >= start_up_steps(seconds)
    return np.asarray(later & (seconds > _STALL * np.median(seconds)) & ~np.isin(start.steps, outer))


def stalls_of(start: JournalStart, stragglers: Stragglers | None) -> Stalls | None:
    """Return the stalls of a start, with the ranks that paused in them, by the stamps; None without any."""
    seconds, step, mine = np.array(start.seconds), np.array(start.steps), stalled(start)
    if not mine.any():
        return None
    more = seconds[mine] - np.median(seconds)
    paused = [pause for pause in stragglers.pauses if pause.step in step[mine]] if stragglers else []
    recorded = len({pause.step for pause in paused})
    counts = np.bincount([pause.rank for pause in paused]) if paused else np.zeros(0, int)
    return Stalls(
        steps=step[mine].tolist(),
        extra_ms=1e3 * float(more.sum()),
        share=float(more.sum() / seconds.sum()),
        longest_step=int(step[mine][np.argmax(more)]),
        longest_ms=1e3 * float(more.max()),
        recorded=recorded,
        ranks=np.flatnonzero(counts > _MOSTLY * recorded).tolist(),
    )
