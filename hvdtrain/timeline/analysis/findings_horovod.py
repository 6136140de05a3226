"""Findings of a Horovod Timeline alone, of any program. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hvdtrain.timeline import wording
from hvdtrain.timeline.analysis.analysis import Budget, Communication, Finding
from hvdtrain.timeline.analysis.budget import IDLE
from hvdtrain.timeline.analysis.phases import COPIES, NEGOTIATION, QUEUE, TRANSFER, count_steps, whole_collectives
from hvdtrain.timeline.columns import HorovodTrace, RunTrace

_MUCH = 0.2
"""Share of the wall time."""
_MANY = 50
_SMALL_BYTES = 1 << 20
_TURNS_WITH_TICKS = 5


def timeline_findings(
    run: RunTrace, budget: Budget, communication: Communication | None, *, ticks: bool
) -> Iterator[Finding]:
    """Yield findings of Timelines without a run. They do not show what backward hides, so costs are unknown.

    `ticks`: they contain ticks, from which stragglers are known.
    """
    shares = {part.name: part.share for part in budget.parts}
    yield from _cache(run)
    many = _collectives_a_step(run)
    waits = shares.get(NEGOTIATION, 0.0)
    if waits >= _MUCH:
        text = f"{waits:.0%} of the time is negotiation alone: ranks are not ready, or wait for a cycle"
        advice = "do a short run with HOROVOD_CACHE_CAPACITY=0, which records when ranks are ready; then repeat this"
        if ticks:
            advice = "find the straggler; without one, use a shorter cycle: HOROVOD_CYCLE_TIME=0.5"
        yield Finding("negotiation", text, None, advice)
    if shares.get(QUEUE, 0.0) >= _MUCH:
        text = f"tensors only wait in Horovod's queue or for their data during {shares[QUEUE]:.0%} of the time"
        yield Finding("queue", text, None, "on GPUs they wait for backward to produce them; no setting changes that")
    if shares.get(COPIES, 0.0) >= _MUCH / 4:
        text = f"copies into and out of the fusion buffer take {shares[COPIES]:.0%} of the time"
        advice = "flat buckets need no copies: import hvdtrain.torch as hvd instead of horovod.torch"
        yield Finding("fusion_copies", text, None, advice)
    if shares.get(TRANSFER, 0.0) >= _MUCH:
        rate = communication.bus_gb_per_s if communication else None
        at = f" at a bus bandwidth of {wording.speed(rate)}" if rate else ""
        text = f"transfers take {shares[TRANSFER]:.0%} of the time{at}; this file does not show how much backward hides"
        sent = communication.bytes_per_step if communication else None
        advice = "send less: compression=hvd.Compression.fp16 in DistributedOptimizer"
        if sent is not None and sent < _SMALL_BYTES:
            advice = f"only {wording.nbytes(sent)} per step: latency dominates; look for ranks that wait for CPU cores"
        yield Finding("transfer", text, None, advice)
    yield from _small(many)
    if shares.get(IDLE, 0.0) >= 1 - _MUCH / 4:
        text = f"nothing is exchanged during {shares[IDLE]:.0%} of the time: communication is not the bottleneck"
        yield Finding("idle", text, None, "profile the program itself: torch.profiler, or hvdtrain's own timeline")


def _cache(run: RunTrace) -> Iterator[Finding]:
    """Report a response cache that is too small: later steps have ticks too, which full negotiation writes."""
    for trace in run.horovod:
        steps = count_steps(trace)
        if not len(trace.tick_tensor) or steps <= 2 * _TURNS_WITH_TICKS:
            continue
        ranks = int(trace.tick_rank.max()) + 1
        turns = np.bincount(trace.tick_tensor, minlength=len(trace.tensors)) / ranks
        full = int(np.sum(turns > _TURNS_WITH_TICKS))
        if full:
            text = f"{full} tensors were negotiated in full in every step: Horovod's response cache is too small"
            advice = f"HOROVOD_CACHE_CAPACITY={max(2048, 2 * len(trace.tensors))}, unless it was 0 on purpose"
            yield Finding("cache", text, None, advice)
            return


def _collectives_a_step(run: RunTrace) -> tuple[float, float] | None:
    """Return collectives per step and mean bytes of each; None if the steps are unknown."""
    steps = sum(map(count_steps, run.horovod))
    if not steps:
        return None
    known = [_known(trace) for trace in run.horovod]
    count = sum(len(each) for each in known)
    return count / steps, float(np.mean(np.concatenate(known))) if count else 0.0


def _known(trace: HorovodTrace) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.asarray(trace.nbytes[whole_collectives(trace) & (trace.nbytes >= 0)])


def _small(many: tuple[float, float] | None) -> Iterator[Finding]:
    if many is not None and many[0] >= _MANY and many[1] < _SMALL_BYTES:
        text = f"{many[0]:.0f} tensors per step are exchanged, of {many[1] / 1e3:.0f} kB on average"
        advice = "use fewer, larger collectives: HOROVOD_CYCLE_TIME=5 collects longer; or import hvdtrain.torch as hvd"
        yield Finding("small_tensors", text, None, advice)
