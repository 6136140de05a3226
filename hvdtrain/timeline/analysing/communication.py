"""The exchange: how long, how much of it hidden, how fast. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdtrain.timeline.analysing.intervals import Span, common, length, union
from hvdtrain.timeline.analysing.phases import PHASES, TRANSFER, by_kind, extent, steps_of, whole_collectives
from hvdtrain.timeline.analysing.tracks import exchange_of, spans_named
from hvdtrain.timeline.analysis import Communication, Estimate, Part
from hvdtrain.timeline.columns import HorovodTrace, RunTrace, StepTable


def of_run(run: RunTrace) -> Communication | None:
    """What Horovod's Timelines tell of the exchange, or else rank 0's own spans; None where neither does."""
    if run.horovod and any(len(trace.start_us) for trace in run.horovod):
        return _of_timelines(run)
    return _of_spans(run)


def bus_bytes(operation: str, nbytes: float, size: int) -> float:
    """What a rank has to send, and as much to take in, of a collective: NCCL's bus bandwidth is this a second.

    nccl-tests, doc/PERFORMANCE.md: 2 (n - 1) / n of the bytes of an allreduce, n - 1 times what a rank gives to an
    allgather, (n - 1) / n of an alltoall or reducescatter, all of a broadcast.
    """
    factors = {"ALLREDUCE": 2 * (size - 1) / size, "ALLGATHER": size - 1.0, "BROADCAST": 1.0}
    return nbytes * factors.get(operation, (size - 1) / size)


def link_gb_per_s(link: Sequence[tuple[int, float]], size: int) -> float | None:
    """Bus bandwidth of the largest allreduce that was measured by itself, in 1e9 bytes a second."""
    measured = [(nbytes, seconds) for nbytes, seconds in link if seconds > 0]
    if not measured or size < 2:
        return None
    nbytes, seconds = max(measured)
    return bus_bytes("ALLREDUCE", nbytes, size) / seconds / 1e9


def _of_timelines(run: RunTrace) -> Communication:
    phases = by_kind(run.horovod)
    steps = _steps_covered(run)
    each = max(1, steps)
    spans = [phases[name] for name in PHASES if name in phases]
    busy = union(np.concatenate([s[0] for s in spans]), np.concatenate([s[1] for s in spans])) if spans else None
    parts = [(name, length(phases[name]) / 1e3 / each) for name in PHASES if name in phases]
    parts = [(name, ms) for name, ms in parts if ms > 0]
    busy_ms = length(busy) / 1e3 / each if busy is not None else None
    moved, on_bus = _bytes_of(run.horovod, run.size)
    transfer = length(phases[TRANSFER]) / 1e6 if TRANSFER in phases else 0.0
    return Communication(
        [Part(name, Estimate(ms, ms, ms), ms / busy_ms if busy_ms else 0.0) for name, ms in parts],
        busy_ms,
        _hidden(busy, run.steps) if busy is not None and run.steps is not None else None,
        moved / each if moved and steps else None,
        on_bus / transfer / 1e9 if transfer and on_bus else None,
        link_gb_per_s(run.link, run.size),
    )


def _steps_covered(run: RunTrace) -> int:
    """Steps that lie in the Timelines: by the stamps, or by how often tensors come again; 0 where nothing tells."""
    if run.steps is not None:
        ends = [extent(trace) for trace in run.horovod]
        inside = sum(int(np.sum((run.steps.released_us[0] >= a) & (run.steps.released_us[0] <= b))) for a, b in ends)
        if inside:
            return inside
    counts = [steps_of(trace) for trace in run.horovod]
    return sum(counts) if all(counts) else 0


def _bytes_of(traces: Sequence[HorovodTrace], size: int) -> tuple[float, float]:
    """Bytes that a rank handed over in all, and what it had to send of them."""
    moved = on_bus = 0.0
    for trace in traces:
        known = whole_collectives(trace) & (trace.nbytes > 0)
        for number in np.unique(trace.phase[known]):
            nbytes = float(trace.nbytes[known & (trace.phase == number)].sum())
            moved += nbytes
            on_bus += bus_bytes(trace.phases[number], nbytes, size) if size > 1 else 0.0
    return moved, on_bus


def _hidden(busy: Span, table: StepTable) -> float | None:
    """The share of `busy` in the stamped steps in which rank 0 did not wait."""
    steps = union(table.start_us[0], table.end_us[0])
    inside = common(busy, steps)
    if not length(inside):
        return None
    waiting = union(table.ready_us[0], table.released_us[0])
    return 1 - length(common(inside, waiting)) / length(inside)


def _of_spans(run: RunTrace) -> Communication | None:
    ours = next((spans for spans in run.spans if spans.rank == 0), None)
    if ours is None:
        return None
    exchange, steps = exchange_of(ours)
    busy = length(exchange) / 1e3 / max(1, steps)
    if not busy:
        return None
    waiting = length(common(exchange, spans_named(ours, "wait"))) / 1e3 / max(1, steps)
    sent = sum(facts.length * item_bytes(facts.dtype) for facts in ours.buckets.values())
    link = link_gb_per_s(run.link, run.size)
    return Communication([], busy, 1 - waiting / busy, float(sent) or None, None, link)


def item_bytes(dtype: str) -> int:
    """Bytes of an element of a bucket."""
    return {"float64": 8, "bfloat16": 2, "float16": 2}.get(dtype, 4)
