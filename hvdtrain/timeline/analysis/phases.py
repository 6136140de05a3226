"""Sets of intervals; kinds of Horovod's phases, and the steps of a Timeline. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hvdtrain.timeline.columns import Floats, HorovodTrace

TRANSFER, COPIES, QUEUE, NEGOTIATION, OTHER = "transfer", "fusion copies", "queue", "negotiation", "other"
PHASES = (TRANSFER, COPIES, QUEUE, NEGOTIATION)
"""By priority: a moment in several phases counts for the first, so that moving data comes first."""

_COLLECTIVES = ("ALLREDUCE", "ALLGATHER", "BROADCAST", "ALLTOALL", "REDUCESCATTER", "JOIN", "BARRIER", "ADASUM")
NEVER_CACHED = ("broadcast.", "reducescatter.")
"""What the names of tensors begin with that ranks negotiate in every step; Horovod caches others."""
_MOVING = ("MPI_", "NCCL_", "GLOO_", "CCL_", "ADASUM_", "DDL_", "MLSL_", "COMMUNICATE")
_REGULAR_SHARE = 0.5
_FEW_STEPS = 4
_DOMINANT = 2.0
"""Times the operations and the extent of other tensors that recur."""


def kind_of(phase: str) -> str:
    """Return the kind of a phase of Horovod; "" for a whole collective, which contains other phases."""
    if phase.startswith("NEGOTIATE_"):
        return NEGOTIATION
    if phase in ("QUEUE", "WAIT_FOR_DATA", "WAIT_FOR_OTHER_TENSOR_DATA"):
        return QUEUE
    if "MEMCPY" in phase:
        return COPIES
    if phase in _COLLECTIVES:
        return ""
    if phase.startswith(_MOVING) or phase.startswith(tuple(f"{name}_" for name in _COLLECTIVES)):
        return TRANSFER
    return OTHER


def by_kind(traces: Sequence[HorovodTrace]) -> dict[str, Span]:
    """Return when each kind of phase was in progress for any tensor; "" for whole collectives."""
    ends = [trace.start_us + trace.duration_us for trace in traces]
    found = {}
    for kind in (*PHASES, OTHER, ""):
        mine = [of_kind(trace, kind) for trace in traces]
        found[kind] = together((t.start_us[m], end[m]) for t, end, m in zip(traces, ends, mine, strict=True))
    return found


def of_kind(trace: HorovodTrace, *kinds: str) -> NDArray[np.bool_]:
    """Return which intervals are phases of these kinds [n]."""
    return np.isin(trace.phase, [i for i, name in enumerate(trace.phases) if kind_of(name) in kinds])


def whole_collectives(trace: HorovodTrace) -> NDArray[np.bool_]:
    """Return which intervals are whole collectives [n]."""
    return of_kind(trace, "")


def count_steps(trace: HorovodTrace) -> int:
    """Return the number of steps: how often tensors recur with few others between them, for most of the file; else 0.

    Broadcasts belong to starts and checkpoints. They count only if there is nothing else.
    """
    broadcast = [i for i, name in enumerate(trace.phases) if name == "BROADCAST"]
    mine = whole_collectives(trace) & ~np.isin(trace.phase, broadcast)
    begin, end = trace.start_us[mine], (trace.start_us + trace.duration_us)[mine]
    counts = np.bincount(trace.tensor[mine], minlength=len(trace.tensors))
    own = counts[trace.tensor[mine]]
    found = {0: (0.0, 0)}
    for count in np.unique(own[own > 1]).tolist():
        same = (np.abs(own - count) <= 1) & (own > 1)  # the first or the last step of a file may be incomplete
        first, last = begin[same].min(), end[same].max()
        if np.mean(same[(begin >= first) & (end <= last)]) >= _REGULAR_SHARE:
            found[count] = (float(same.sum() * (last - first)), int(np.sum(own == count)))
    steps = max(found, key=lambda count: found[count])
    next_best = max((amount for count, (amount, _) in found.items() if abs(count - steps) > 1), default=0.0)
    return steps if found[steps][0] > _DOMINANT * next_best else 0


def only_steps(trace: HorovodTrace) -> HorovodTrace:
    """Cut a Timeline to its steps from the second to the last one, without what comes before and after. Ticks are kept.

    A Timeline with few or no recognisable steps is returned whole.
    """
    steps = count_steps(trace)
    if steps < _FEW_STEPS:
        return trace
    whole = np.flatnonzero(whole_collectives(trace))
    ends = trace.start_us[whole] + trace.duration_us[whole]
    _, first, own, counts = np.unique(trace.tensor[whole], return_index=True, return_inverse=True, return_counts=True)
    of_step = np.abs(counts - steps) <= 1
    begin = float(ends[first[of_step]].max())  # intervals are ordered by their ends
    inside = (trace.start_us >= begin) & (trace.start_us <= float(ends[of_step[own]].max()))
    columns = ("tensor", "phase", "start_us", "duration_us", "nbytes")
    return replace(trace, **{name: getattr(trace, name)[inside] for name in columns})


def recurring(trace: HorovodTrace) -> NDArray[np.bool_]:
    """Return which tensors recur about once per step [tensors]; all of them if the steps are unknown."""
    steps = count_steps(trace)
    counts = np.bincount(trace.tensor[whole_collectives(trace)], minlength=len(trace.tensors))
    return np.asarray(counts >= max(1, steps / 2))


def extent(trace: HorovodTrace) -> tuple[float, float]:
    """Return when the first interval begins and the last one ends; zeros if there is none."""
    if not len(trace.start_us):
        return 0.0, 0.0
    return float(trace.start_us.min()), float((trace.start_us + trace.duration_us).max())


Span = tuple[Floats, Floats]
"""Starts and ends of disjoint intervals, ascending [n]."""

NOTHING: Span = (np.zeros(0), np.zeros(0))


def union(start: Floats, end: Floats) -> Span:
    """Return the union of intervals in any order; empty ones are dropped."""
    good = end > start
    start, end = np.asarray(start, float)[good], np.asarray(end, float)[good]
    if not len(start):
        return NOTHING
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    first = np.concatenate([[True], start[1:] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return start[first], reach[last]


def together(spans: Iterable[Span]) -> Span:
    """Return the union of intervals of several sets, in any order."""
    every = [NOTHING, *spans]
    return union(np.concatenate([start for start, _ in every]), np.concatenate([end for _, end in every]))


def length(span: Span) -> float:
    """Return the total length."""
    return float(np.sum(span[1] - span[0]))


def within(span: Span, start: Floats, end: Floats) -> Floats:
    """Return the length of a set between each start and its end [n]."""
    if not len(span[0]):
        return np.zeros(len(start))
    before = np.concatenate([[0.0], np.cumsum(span[1] - span[0])])

    def until(moments: Floats) -> Floats:
        begun = np.searchsorted(span[0], moments)  # intervals that begin before
        inside = np.clip(span[1][begun - 1] - moments, 0.0, None)
        return np.where(begun > 0, before[begun] - inside, 0.0)

    return np.asarray(until(end) - until(start))


def common(a: Span, b: Span) -> Span:
    """Return the intersection."""
    first = np.searchsorted(b[1], a[0], side="right")
    count = np.maximum(0, np.searchsorted(b[0], a[1], side="left") - first)
    of_a = np.repeat(np.arange(len(count)), count)
    of_b = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
    return union(np.maximum(a[0][of_a], b[0][of_b]), np.minimum(a[1][of_a], b[1][of_b]))


def without(a: Span, b: Span) -> Span:
    """Return the difference `a` minus `b`."""
    gaps = np.concatenate([[-np.inf], b[1]]), np.concatenate([b[0], [np.inf]])
    return common(a, gaps)


def partition(whole: Span, parts: Mapping[str, Span]) -> dict[str, Span]:
    """Split `whole`: each moment belongs to the first of `parts` that contains it, else to ""."""
    found: dict[str, Span] = {}
    for name, part in parts.items():
        found[name] = common(whole, part)
        whole = without(whole, part)
    return {**found, "": whole}
