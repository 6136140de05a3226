"""When a job ends, from what was measured: its steps, evaluations, checkpoints and failures. Pure.

The interval between checkpoints that costs least is Young's (CACM 17, 1974) as Daly refined it (Future Generation
Computer Systems 22, 2006).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hvdtrain.observe.cost import S_PER_HOUR, devices_of
from hvdtrain.observe.past_journal import JournalStart
from hvdtrain.observe.scalars import numbers
from hvdtrain.timeline.analysis.analysis import Estimate
from hvdtrain.timeline.analysis.goodput import EVALUATIONS, PAUSES, RESTARTS, START_UP, goodput_of
from hvdtrain.timeline.analysis.rank_steps import start_up_steps
from hvdtrain.timeline.analysis.stats import Z_975, mean_of

LEAST_STEPS = 16
_AT_END = ("finished", "stop_at")
"""Why a run ends that has not ended early."""
_Z_95 = 1.644854
BETWEEN = 0.03
"""How much the mean steps of two equal jobs differ, as a share: one standard deviation."""
_OF_PAUSES = 0.3
"""The same of start-ups, evaluations and checkpoints, which are few."""


@dataclass(frozen=True)
class Pace:
    """What the parts of a job take, in seconds."""

    ranks: int
    steps: int  # that were measured, without those of the start-up
    step_s: Estimate  # mean of these, with its 95% interval
    start_s: float  # until the first step, and what the first steps took longer
    evaluation_s: float
    save_s: float  # for which a checkpoint stops training


@dataclass(frozen=True)
class Ending:
    """Seconds until the end with their 90% interval, and by part."""

    seconds: Estimate
    parts: Mapping[str, float]

    def probability(self, deadline_s: float) -> float:
        """Return how likely it is that the end comes before `deadline_s`."""
        deviation_s = max(1e-9, (self.seconds.high - self.seconds.value) / _Z_95)
        return 0.5 * (1 + math.erf((deadline_s - self.seconds.value) / deviation_s / math.sqrt(2)))


def pace_of(starts: Sequence[JournalStart]) -> Pace | None:
    """Return the pace of the newest start with `LEAST_STEPS` steps; None without one."""
    for start in reversed(starts):
        seconds = np.array(start.seconds)
        used, size = goodput_of([start]), start.started.get("size")
        seconds = seconds[start_up_steps(seconds) :]
        if used is None or not isinstance(size, int) or len(seconds) < LEAST_STEPS:
            continue
        by_use = {use: hours * S_PER_HOUR / devices_of(start) for use, hours in used.hours.items()}
        evaluated, saved = (len(start.events_named(name)) for name in ("evaluation", "checkpoint"))
        beginning = by_use.get(START_UP, 0.0) + by_use.get(RESTARTS, 0.0)
        counts = ((EVALUATIONS, evaluated), (PAUSES, saved))
        each = (by_use.get(use, 0.0) / count if count else 0.0 for use, count in counts)
        return Pace(size, len(seconds), mean_of(seconds), beginning, *each)
    return None


def due(step: int, stop: int, every: int) -> int:
    """Return how often something is due after `step` and until `stop`: every N steps, and at the end."""
    return stop // every - step // every + (stop % every > 0) if every else 1


def ending(
    pace: Pace,
    steps: int,
    evaluations: int,
    checkpoints: int,
    *,
    failures_per_s: float = 0.0,
    is_same_job: bool = False,
) -> Ending:
    """Return when a job ends that has this pace.

    Each failure costs a start and half of the steps between two checkpoints. The same job has no further start-up.
    """
    mean, every = pace.step_s.value, steps / max(1, checkpoints)
    parts = {
        "steps": steps * mean,
        "evaluations": evaluations * pace.evaluation_s,
        "checkpoints": checkpoints * pace.save_s,
        "start-up": 0.0 if is_same_job else pace.start_s,
    }
    base, lost_s = sum(parts.values()), pace.start_s + every / 2 * mean
    left = 1 - failures_per_s * lost_s
    whole = base / left if left > 0 else math.inf
    parts["failures"] = whole - base
    of_mean = (pace.step_s.high - mean) / Z_975
    errors = [
        steps * of_mean,
        math.sqrt(steps * pace.steps) * of_mean,  # of the steps to come
        0.0 if is_same_job else BETWEEN * parts["steps"],
        _OF_PAUSES * parts["evaluations"],
        _OF_PAUSES * parts["checkpoints"],
        _OF_PAUSES * parts["start-up"],
        math.sqrt(failures_per_s * whole) * lost_s if failures_per_s else 0.0,
    ]
    half = _Z_95 * math.hypot(*errors)
    return Ending(Estimate(whole, max(0.0, whole - half), whole + half), parts)


@dataclass(frozen=True)
class Kept:
    """How good the first promise of a run was: see `training.records.promise`."""

    at_step: int
    late_s: float  # how much later than promised it ended
    share: float  # the same, of the time from the promise to the promised end
    is_within: bool  # its interval


def kept(starts: Sequence[JournalStart]) -> Kept | None:
    """Return how a run kept its first promise; None without one, if other ranks took over, or if it ended early."""
    events = [event for start in starts[-1:] for event in start.events if event.get("reason", "finished") in _AT_END]
    named = {event["event"].replace("stopped", "finished"): numbers(event) for event in reversed(events)}
    promise, end = named.get("promise", {}), named.get("finished", {}).get("time")
    if end is None or not promise.keys() >= {"at_step", "time", "end", "low", "high"}:
        return None
    late_s, is_within = end - promise["end"], promise["low"] <= end <= promise["high"]
    return Kept(int(promise["at_step"]), late_s, late_s / max(1e-9, promise["end"] - promise["time"]), is_within)


def best_every(pace: Pace, failures_per_s: float) -> int:
    """Return the number of steps between checkpoints that costs least, for saving and for what failures repeat."""
    ratio = pace.save_s * failures_per_s / 2
    if ratio >= 1:
        seconds = 1 / failures_per_s
    else:
        root = math.sqrt(ratio)
        seconds = math.sqrt(2 * pace.save_s / failures_per_s) * (1 + root / 3 + ratio / 9) - pace.save_s
    return max(1, round(seconds / pace.step_s.value))
