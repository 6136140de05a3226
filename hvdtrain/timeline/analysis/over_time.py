"""The step time over a run, with what happened: for a picture. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from hvdtrain.timeline import wording
from hvdtrain.timeline.analysis.analysis import Blame, Change, Mark, Moment, OverTime
from hvdtrain.timeline.analysis.budget import REST
from hvdtrain.timeline.columns import JournalSteps, RunTrace

_MOMENTS = 200
_MOST_MARKS = 100
"""Of each kind."""


def over_time(run: RunTrace, changes: Sequence[Change], blame: Blame) -> OverTime | None:
    """Return moments of equal length, and starts, changes and stragglers; None without a journal."""
    if run.history is None:
        return None
    moments = list(_moments(run.history))
    kinds = [list(_starts(run)), list(_changes(changes)), list(_spells(blame))]
    marks = [mark for found in kinds for mark in found[:_MOST_MARKS]]
    return OverTime(moments, sorted(marks, key=lambda mark: mark.step))


def turns(changes: Sequence[Change], blame: Blame) -> list[int]:
    """Return the steps at which something changed."""
    return [mark.step for mark in (*_changes(changes), *_spells(blame))]


def _moments(history: JournalSteps) -> Iterator[Moment]:
    first, last = int(history.step[0]), int(history.step[-1])
    length = -(-(last - first + 1) // _MOMENTS)
    place = (history.step - first) // length
    begins_s = np.full(len(place), np.nan) if history.time_s is None else history.time_s - history.step_ms / 1e3
    for number in np.unique(place).tolist():
        mine = place == number
        step_ms = history.step_ms[mine]
        parts = {name: float(values[mine].mean()) for name, values in history.parts_ms.items()}
        parts[REST] = max(0.0, float(step_ms.mean()) - sum(parts.values()))
        begin = first + number * length
        end = min(begin + length - 1, last)
        after_s = float(begins_s[mine][0] - begins_s[0])
        known = after_s if math.isfinite(after_s) else None
        yield Moment(begin, end, float(step_ms.mean()), float(np.median(step_ms)), parts, known)


def _starts(run: RunTrace) -> Iterator[Mark]:
    for start in run.starts:
        size = start.started.get("size")
        if start.first_step is not None and isinstance(size, int):
            how = "continues" if start.first_step > 1 else "starts"
            yield Mark("start", start.first_step, f"the run {how} on {wording.counted(size, 'rank')}")


def _changes(changes: Sequence[Change]) -> Iterator[Mark]:
    for change in changes:
        if not change.begins:
            yield Mark("change", change.first_step, f"steps take longer, {wording.slower(change)}")
        if not change.lasts:
            yield Mark("change", change.last_step, f"steps are as usual again, before {wording.slower(change)}")


def _spells(blame: Blame) -> Iterator[Mark]:
    for spell in blame.spells:
        causes = blame.causes.get(spell.rank, ())
        why = f": {causes[0].text}" if causes else ""
        who = wording.straggler(blame, spell.rank, on=False)
        yield Mark("straggler", spell.first_step, f"{who} becomes a straggler{why}")
        if not spell.lasts:
            yield Mark("straggler", spell.last_step, f"{who} is no straggler any more")
