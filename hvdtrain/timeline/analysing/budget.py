"""Where a step's wall time goes, in parts that sum to it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hvdtrain.timeline.analysing.intervals import NOTHING, Span, common, length, partition, union
from hvdtrain.timeline.analysing.phases import OTHER, PHASES, by_kind, extent, steps_of
from hvdtrain.timeline.analysing.rounds import follows, warm_up
from hvdtrain.timeline.analysing.stats import mean_of
from hvdtrain.timeline.analysis import Budget, Estimate, Part
from hvdtrain.timeline.columns import Floats, HorovodTrace, StepTable

LATE = "waiting for late ranks"
EXCHANGE = "exchange"
"""What is exposed after the last rank is ready, where no Timeline of Horovod's tells more."""
REST, ASIDE, IDLE = "rest", "evaluations and checkpoints", "nothing under way"
OTHER_EXCHANGE = "other exchange"
_LEAST = 1e-6
"""Of a step: less is rounding."""

_NAMES = {
    "data": "data",
    "copy": "data",
    "forward": "forward",
    "backward": "backward",
    "clip": "optimizer",
    "optimizer": "optimizer",
    "aside": ASIDE,
}
ORDER = ("data", "forward", "backward", LATE, *reversed(PHASES), OTHER_EXCHANGE, EXCHANGE, "optimizer", ASIDE, REST)


def of_steps(table: StepTable, horovod: Sequence[HorovodTrace] = ()) -> Budget | None:
    """The budget of a step table: the mean over ranks, of all steps but the first ones; None without steps.

    A step's wall time runs from the end of the step before to its own end, so that they add up to the run's. Of it, the
    wait for sums (from ready to released) is cut where the last rank became ready; what is left is cut by what
    Horovod's Timeline says of rank 0, in the same shares for steps that it does not cover. Other parts are as measured;
    where they overlap that wait, as work of a device does, they are shortened to what is left.
    """
    wall, parts = step_parts(table)
    if not wall.size:
        return None
    exchange = parts.pop(EXCHANGE)
    columns = {name: values.mean(axis=0) for name, values in parts.items()}
    shares = exposed_shares(table, horovod)
    columns |= {name: exchange.mean(axis=0) * share for name, share in shares.items()}
    whole = mean_of(wall.mean(axis=0))
    ranks = len(table.hosts)
    what = "rank 0" if ranks == 1 else f"mean of {ranks} ranks"
    exposed = [name for name in ORDER if name == LATE or name in shares]
    return _budget(what, whole, wall.shape[1], {name: mean_of(columns[name]) for name in columns}, exposed)


def step_parts(table: StepTable) -> tuple[Floats, dict[str, Floats]]:
    """Wall time of each step, and its parts, in ms [ranks, steps]; the parts sum to the wall time, number by number."""
    before = np.where(follows(table), np.roll(table.end_us, 1, axis=1), table.start_us)
    wall = (table.end_us - before) / 1e3
    keep = np.isfinite(wall).all(axis=0) & np.isfinite(table.released_us - table.ready_us).all(axis=0)
    keep &= np.arange(wall.shape[1]) >= warm_up(table)
    wall = np.maximum(0.0, wall[:, keep])
    wait = np.clip((table.released_us - table.ready_us)[:, keep] / 1e3, 0.0, wall)
    late = np.clip((table.ready_us.max(axis=0) - table.ready_us)[:, keep] / 1e3, 0.0, wait)
    parts: dict[str, Floats] = {}
    for name, durations in table.parts_us.items():
        if (shown := _NAMES.get(name)) is not None:
            parts[shown] = parts.get(shown, 0.0) + np.nan_to_num(durations[:, keep]) / 1e3
    known = sum(parts.values(), np.zeros_like(wall))
    left = wall - wait
    fits = np.where(known > left, left / np.maximum(known, 1e-12), 1.0)
    parts = {name: values * fits for name, values in parts.items()}
    parts |= {LATE: late, EXCHANGE: wait - late, REST: np.maximum(0.0, left - known)}
    return wall, parts


def exposed_shares(table: StepTable, horovod: Sequence[HorovodTrace]) -> dict[str, float]:
    """What rank 0 did in the wait for sums after the last rank was ready, as shares that sum to 1."""
    waiting = union(table.ready_us.max(axis=0), table.released_us[0])
    seen = [extent(trace) for trace in horovod]
    waiting = common(waiting, union(*(np.array(ends) for ends in zip(*seen, strict=True)))) if seen else waiting
    if not seen or not length(waiting):
        return {EXCHANGE: 1.0}
    phases = by_kind(horovod)
    cut = partition(waiting, {name: phases[name] for name in PHASES if name in phases})
    cut[OTHER_EXCHANGE] = cut.pop("")
    if length(cut[OTHER_EXCHANGE]) > 0.95 * length(waiting):  # of other tensors, or by a clock that is not ours
        return {EXCHANGE: 1.0}
    return {name: length(part) / length(waiting) for name, part in cut.items()}


def of_timeline(horovod: Sequence[HorovodTrace]) -> Budget | None:
    """The budget of Timelines by themselves: their whole extent, by what is under way for any tensor; None if empty.

    Where tensors come again as often as each other, a step is one turn of them; else the whole is one.
    """
    ends = [extent(trace) for trace in horovod]
    wall_us = sum(end - start for start, end in ends)
    if wall_us <= 0:
        return None
    steps = sum(map(steps_of, horovod)) if all(map(steps_of, horovod)) else 0
    parts: dict[str, float] = {}
    for trace, (start, end) in zip(horovod, ends, strict=True):
        for name, part in cut_timeline(trace, union(np.array([start]), np.array([end]))).items():
            parts[name] = parts.get(name, 0.0) + length(part) / max(1, steps) / 1e3
    exact = {name: Estimate(ms, ms, ms) for name, ms in parts.items()}
    wall = wall_us / max(1, steps) / 1e3
    return _budget("rank 0's communication", Estimate(wall, wall, wall), steps or 1, exact, [])


def cut_timeline(trace: HorovodTrace, whole: Span) -> dict[str, Span]:
    """`whole` by what is under way in a Timeline."""
    phases = by_kind([trace])
    rest = [phases[kind] for kind in (OTHER, "") if kind in phases] or [NOTHING]
    phases[OTHER] = union(np.concatenate([span[0] for span in rest]), np.concatenate([span[1] for span in rest]))
    cut = partition(whole, {name: phases[name] for name in (*PHASES, OTHER) if name in phases})
    cut[IDLE] = cut.pop("")
    return cut


def _budget(what: str, whole: Estimate, steps: int, ms: Mapping[str, Estimate], exposed: Sequence[str]) -> Budget:
    names = [*(name for name in ORDER if name in ms), *(name for name in ms if name not in ORDER)]
    share = 1 / whole.value if whole.value else 0.0
    parts = [Part(name, ms[name], ms[name].value * share) for name in names if ms[name].value > _LEAST * whole.value]
    return Budget(what, whole, steps, parts, [part.name for part in parts if part.name in exposed])
