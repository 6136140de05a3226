"""How the step time of a run changed, from the journal: at its start, later for all ranks, and as a picture. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise

import numpy as np
from numpy.typing import NDArray

from hvdtrain.timeline import wording
from hvdtrain.timeline.analysis.analysis import Blame, Change, Mark, Moment, OverTime, StartUp
from hvdtrain.timeline.analysis.budget import REST
from hvdtrain.timeline.analysis.rank_steps import start_up_steps
from hvdtrain.timeline.analysis.stats import change_points
from hvdtrain.timeline.columns import Floats, JournalSteps, RunTrace, StepTable

_WORTH_MS, _WORTH_SHARE = 0.2, 0.1
"""A smaller change of the step, in ms or as a share, does not count."""
_PART_SHARE = 0.2
"""Of a change: a part with less of it is not named."""
_NEAR = 0.02
"""Of a run: what happened so shortly before or after a change coincides with it."""
_FACTS = {
    "gpu_clock_mhz": ("the clock of GPUs", "MHz", 0.03),
    "gpu_temperature_c": ("the temperature of GPUs", "°C", 0.1),
}
"""Name, unit, and the least change as a share."""
_MORE_TOKENS = 0.05
_LONG = 0.1
"""Of a run: a shorter stretch of fast steps is not what is usual."""
_EVENTS = {
    "resumed": "the run was resumed",
    "config_changed": "options were changed",
    "compression_chosen": "a compression was chosen",
    "shares": "ranks got other shares of the batch",
}


def start_up(journal: JournalSteps) -> StartUp | None:
    """Return the start-up of a run; None if its first steps are not recorded, or take no longer than others."""
    count = start_up_steps(journal.step_ms)
    if not count or (np.diff(journal.step[: count + 1]) > 1).any():
        return None
    usual = float(np.median(journal.step_ms[count:]))
    return StartUp(count, float(np.sum(journal.step_ms[:count] - usual)), usual)


def changes(run: RunTrace) -> list[Change]:
    """Return the stretches in which steps took longer for all ranks than in the fastest long one, in their order.

    The start-up is left out.
    """
    journal = run.journal
    if journal is None:
        return []
    ms, step, first = journal.step_ms, journal.step, start_up_steps(journal.step_ms)
    least = max(_WORTH_MS, _WORTH_SHARE * _median(ms[first:]))
    levels = _levels(ms, first, least)
    long = [each for each in levels if each.stop - each.start >= _LONG * (len(ms) - first)]
    usual = min(long, key=lambda each: _median(ms[each]))
    found = []
    for each in levels:
        more = _median(ms[each]) - _median(ms[usual])
        if more < least:
            continue
        parts = {part: _median(v[each]) - _median(v[usual]) for part, v in journal.parts_ms.items()}
        begins, begin, end = each.start == first, int(step[each.start]), int(step[each.stop - 1])
        turned, near = end if begins else begin, max(1.0, _NEAR * float(step[-1] - step[first]))
        coincided = [*_differences(run.steps, journal, usual, each), *_events(run, turned, near)]
        found.append(
            Change(
                first_step=begin,
                last_step=end,
                begins=begins,
                lasts=each.stop == len(ms),
                usual_ms=_median(ms[usual]),
                step_ms=_median(ms[each]),
                share=(each.stop - each.start) / len(step),
                parts_ms={part: value for part, value in parts.items() if value >= _PART_SHARE * more},
                coincided=coincided,
            )
        )
    return found


def _median(values: Floats) -> float:
    return float(np.median(values))


def _levels(ms: Floats, first: int, least: float) -> list[slice]:
    """Return stretches of equal level from `first` on; neighbours differ by `least` or more."""
    edges = [first, *(first + at for at in change_points(ms[None, first:], least)), len(ms)]
    found = [slice(*edges[:2])]
    for begin, end in pairwise(edges[1:]):
        if abs(_median(ms[begin:end]) - _median(ms[found[-1]])) < least:
            found[-1] = slice(found[-1].start, end)
        else:
            found.append(slice(begin, end))
    return found


def _differences(table: StepTable | None, journal: JournalSteps, usual: slice, then: slice) -> Iterator[str]:
    """Yield other tokens of batches, and what differs on the devices of all ranks: medians over blocks and ranks."""
    was, now = (_median(journal.tokens[each]) for each in (usual, then))
    if was > 0 and abs(now / was - 1) > _MORE_TOKENS:  # not if unknown, NaN
        yield f"batches have {now:,.0f} tokens instead of {was:,.0f}"
    for fact, (name, unit, least) in _FACTS.items():
        was, now = (_of_devices(table, fact, journal.step[each]) for each in (usual, then))
        if was > 0 and abs(now / was - 1) >= least:
            yield f"{name} is {now:,.0f} {unit} instead of {was:,.0f}"


def _of_devices(table: StepTable | None, fact: str, steps: NDArray[np.int64]) -> float:
    """Return the median over the blocks of some steps; NaN if it is unknown."""
    if table is None:
        return math.nan
    blocks = np.unique(table.block[(table.step >= steps[0]) & (table.step <= steps[-1])])
    rows = [table.facts[block].get(fact) or () for block in blocks]
    values = [value for row in rows for value in row if isinstance(value, (int, float))]
    return float(np.nanmedian(values)) if np.isfinite(values).any() else math.nan


def _events(run: RunTrace, turned: int, near: float) -> Iterator[str]:
    for name, text in _EVENTS.items():
        steps = [event.get("at_step") for event in run.start.events_named(name)]
        for at in [at for at in steps if isinstance(at, int) and abs(at - turned) <= near][:1]:
            yield f"{text} at step {at:,}"


_MOMENTS = 200
_MOST_MARKS = 100
"""Of each kind."""


def over_time(run: RunTrace, changes: Sequence[Change], blame: Blame) -> OverTime | None:
    """Return moments of equal length, and starts, changes and stragglers; None without a journal."""
    if run.history is None:
        return None
    kinds = (_starts(run), _changes(changes), _spells(blame))
    marks = [mark for found in kinds for mark in islice(found, _MOST_MARKS)]
    return OverTime(list(_moments(run.history)), sorted(marks, key=lambda mark: mark.step))


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
