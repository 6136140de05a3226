"""Stalled steps, from the journal, which has every step. Pure."""

from __future__ import annotations

import numpy as np

from hvdtrain.observe.past_journal import JournalStart
from hvdtrain.timeline.analysis.rank_steps import start_up_steps

_STALL = 10.0
"""Times a usual step: a step that takes longer, after the start-up, has stalled."""


def stalls_of(start: JournalStart) -> dict[int, float]:
    """Return by how much longer than a usual step each stalled step took, ms.

    The steps in which workers that train apart exchange are none.
    """
    step, ms = np.array(start.steps), 1e3 * np.array(start.seconds)
    if not len(ms):
        return {}
    usual = np.median(ms)
    outer = [event["at_step"] for event in start.events_named("outer_step") if isinstance(event.get("at_step"), int)]
    mine = (np.arange(len(ms)) >= start_up_steps(ms)) & (ms > _STALL * usual) & ~np.isin(step, outer)
    return dict(zip(step[mine].tolist(), (ms[mine] - usual).tolist(), strict=True))
