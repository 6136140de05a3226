"""What the devices' time and peak were used for: goodput, over all starts of a run; efficiency; scaling. Pure.

The term goodput is that of Google: https://github.com/AI-Hypercomputer/ml-goodput-measurement. Its library is not used:
it keeps its records in Google Cloud Logging.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from hvdtrain.observe.cost import S_PER_HOUR, as_mapping, cost_of, devices_of, hours_before, known_starts
from hvdtrain.observe.past_journal import JournalStart
from hvdtrain.observe.scalars import numbers
from hvdtrain.timeline.analysis.analysis import USEFUL, Budget, Efficiency, Goodput, Scaling
from hvdtrain.timeline.analysis.budget import ASIDE, LATE
from hvdtrain.timeline.analysis.rank_steps import stalls_of, start_up_steps
from hvdtrain.timeline.columns import RunTrace

STALLS = "stalled steps"
START_UP, RESTARTS, REPEATED = "start-up", "restarts", "repeated steps"
EVALUATIONS, PAUSES = "evaluations", "checkpoints and other pauses"
USES = (USEFUL, LATE, STALLS, START_UP, RESTARTS, REPEATED, EVALUATIONS, PAUSES)

_ENDED = ("finished", "stopped")


def goodput_of(starts: Sequence[JournalStart], late: Mapping[int, float] | None = None) -> Goodput | None:
    """Return the goodput of a run; None if no start has a record of its ranks.

    `late` is the share of a step, by index of a start, in which its ranks waited for late ones.
    """
    known = known_starts(starts)
    if not known:
        return None
    hours: defaultdict[str, float] = defaultdict(float)
    index, kept = {id(start): number for number, start in enumerate(starts)}, _kept(known)
    for number, (start, gap) in enumerate(zip(known, hours_before(known), strict=True)):
        used = _seconds(start, kept[number], is_first=number == 0)
        waited = used[USEFUL] * (late or {}).get(index[id(start)], 0.0)
        used = {**used, USEFUL: used[USEFUL] - waited, LATE: waited}
        for use, seconds in used.items():
            hours[use] += devices_of(start) * seconds / S_PER_HOUR
        hours[RESTARTS] += gap
    return Goodput({use: hours[use] for use in USES if hours[use] > 0}, _energy(known, kept))


def _energy(starts: Sequence[JournalStart], kept: Sequence[NDArray[np.bool_]]) -> float | None:
    cost = cost_of(starts)
    kinds = [] if cost is None else [*cost.energy_kwh]
    used, counts = [np.zeros(0)], [np.zeros(0, bool)]
    for start, mine in zip(starts, kept, strict=True):
        events = [event for event in start.events_named("energy") if isinstance(event.get("at_step"), int)]
        if kinds and events and len(start.steps):
            values = [[as_mapping(event.get("joules")).get(kind) for kind in kinds] for event in events]
            joules = [sum(value for value in found if isinstance(value, (int, float))) for found in values]
            at_steps = [event["at_step"] for event in events]
            steps = np.array(start.steps)
            # Each step of the ten seconds between two events has used the same.
            known = np.interp(np.append(steps[0] - 1, steps), [steps[0] - 1, *at_steps], [0.0, *joules])
            used.append(np.maximum(np.diff(known), 0.0))
            counts.append(mine)
    total, useful = float(np.concatenate(used).sum()), float(np.concatenate(used)[np.concatenate(counts)].sum())
    return useful / total if total > 0 else None


def _kept(starts: Sequence[JournalStart]) -> list[NDArray[np.bool_]]:
    """Return of each start whether each of its steps counts: it changed something, and was not repeated later."""
    found: list[NDArray[np.bool_]] = []
    later = np.iinfo(np.int64).max
    for start in reversed(starts):
        steps = np.array(start.steps, np.int64)
        least = np.minimum.accumulate(np.append(steps, later)[::-1])[::-1]  # of this step and all later ones
        counts = steps < least[1:]
        counts[start.skipped] = False
        found.append(counts)
        later = int(least[0])
    return found[::-1]


def _seconds(start: JournalStart, kept: NDArray[np.bool_], *, is_first: bool) -> dict[str, float]:
    """Return the seconds of a start by use; the rest are pauses."""
    beginning = START_UP if is_first else RESTARTS
    total = max(0.0, start.last_time - start.started["time"])
    found = dict.fromkeys(USES, 0.0)
    if not len(start.steps):
        return {**found, beginning: total}
    seconds = np.array(start.seconds)
    before, after = list(_evaluations(start, first=True)), list(_evaluations(start, first=False))
    # Lines of workers that train apart are written together, after several steps.
    begin = min(time - float(seconds[: n + 1].sum()) for n, time in enumerate(start.first_times))
    found[REPEATED] = float(seconds[~kept].sum())
    usual, is_later = float(np.median(seconds)), np.arange(len(seconds)) >= start_up_steps(seconds)
    more = np.where(kept, seconds - usual, 0.0)
    slow = max(0.0, float(more[~is_later].sum()))  # of a start-up
    of_use = set(np.array(start.steps)[kept].tolist())
    found[STALLS] = sum(ms / 1e3 for step, ms in stalls_of(start).items() if step in of_use)
    found[USEFUL] = float(seconds[kept].sum()) - found[STALLS] - slow
    found[EVALUATIONS] = sum(before) + sum(after)
    found[beginning] = max(0.0, begin - start.started["time"] - sum(before)) + slow
    if not any(start.events_named(name) for name in _ENDED):
        found[RESTARTS] += max(0.0, start.last_time - start.last_step_time)
    known = sum(found.values())
    if known > total:  # a clock was set
        return {use: seconds * total / known for use, seconds in found.items()}
    return {**found, PAUSES: total - known}


def _evaluations(start: JournalStart, *, first: bool) -> Iterator[float]:
    """Yield the seconds of evaluations before the first step, or of the others."""
    for event in start.events_named("evaluation"):
        is_before = isinstance(at := event.get("at_step"), int) and at < (start.first_step or 0)
        if is_before == first and isinstance(value := event.get("seconds"), (int, float)) and value > 0:
            yield float(value)


_COMPUTE = ("forward", "backward")
_FULL = 4 / 3
"""FLOPs of forward, backward and a second forward pass, over those of the first two."""
_LEAST_STEPS = 16


def efficiency(run: RunTrace, budget: Budget | None) -> Efficiency | None:
    """Return the share of the peak that training uses (MFU), and what the rest is lost to; None if it is unknown.

    MFU, as PaLM defines it (https://arxiv.org/abs/2204.02311), counts the FLOPs of the model alone.
    """
    known = numbers({key: run.newest("flops").get(key) for key in ("per_sample", "peak_per_s")})
    samples = as_mapping(run.config.get("train")).get("global_batch")
    if budget is None or not budget.steps or len(known) < 2 or not isinstance(samples, int):
        return None
    step_s = budget.step_ms.value / 1e3
    used = known["per_sample"] * samples / (known["peak_per_s"] * step_s) if known["peak_per_s"] * step_s > 0 else 0.0
    shares = {part.name: part.share for part in budget.parts}
    computing = sum(shares.get(name, 0.0) for name in _COMPUTE)
    is_full = as_mapping(run.config.get("memory")).get("checkpointing") == "full"
    again = computing * (1 - 1 / _FULL) if is_full else 0.0
    lost = {
        "kernels below the peak": computing - again - used,
        "recomputation": again,
        "exposed communication": sum(part.share for part in budget.exposed_parts),
        LATE: shares.get(LATE, 0.0),
        "input": shares.get("data", 0.0),
        "optimizer": shares.get("optimizer", 0.0),
        ASIDE: shares.get(ASIDE, 0.0),
    }
    lost["rest"] = max(0.0, 1 - used - sum(lost.values()))
    if not 0 < used < 1 or lost["kernels below the peak"] < 0:  # the peak is not that of these devices
        return None
    return Efficiency(used, {name: share for name, share in lost.items() if share > 0})


def scaling(starts: Sequence[JournalStart]) -> Scaling | None:
    """Compare the speed of a device in the last start with that in a start of fewer devices of the same run.

    A step has the same samples in all starts, so the speed of a device is 1 / (devices x median step).
    None if all starts have equally many ranks.
    """
    speeds: dict[int, float] = {}
    for start in starts:
        size = start.started.get("size")
        seconds = np.array(start.seconds)
        seconds = seconds[start_up_steps(seconds) :] if len(seconds) >= _LEAST_STEPS else seconds[:0]
        if isinstance(size, int) and size > 0 and len(seconds) and (usual := float(np.median(seconds))) > 0:
            speeds[size] = 1 / (size * usual)
            last = size
    if len(speeds) < 2 or last == (fewest := min(speeds)):
        return None
    return Scaling(fewest, last, speeds[last] / speeds[fewest])
