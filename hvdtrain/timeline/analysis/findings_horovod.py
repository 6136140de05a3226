"""What a Timeline of Horovod's says by itself, of any program. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hvdtrain.timeline import wording
from hvdtrain.timeline.analysis.analysis import Budget, Communication, Finding
from hvdtrain.timeline.analysis.budget import IDLE
from hvdtrain.timeline.analysis.phases import COPIES, NEGOTIATION, QUEUE, TRANSFER, steps_of, whole_collectives
from hvdtrain.timeline.columns import HorovodTrace, RunTrace

_MUCH = 0.2
"""Of the wall time."""
_MANY = 50
_SMALL_BYTES = 1 << 20
_TURNS_WITH_TICKS = 5


def of_timeline(
    run: RunTrace, budget: Budget, communication: Communication | None, *, ticks: bool
) -> Iterator[Finding]:
    """Findings of Timelines without a run. What backward hides is not in them: no cost is known.

    `ticks`: whether they say who is late.
    """
    shares = {part.name: part.share for part in budget.parts}
    yield from _cache(run)
    many = _collectives_a_step(run)
    waits = shares.get(NEGOTIATION, 0.0)
    if waits >= _MUCH:
        text = f"during {waits:.0%} of the time only negotiation is under way: ranks are not ready, or wait for a cycle"
        advice = "HOROVOD_CACHE_CAPACITY=0 for a short run writes which rank is ready when; then run this again"
        if ticks:
            advice = "see which rank is last; where none is, a shorter cycle: HOROVOD_CYCLE_TIME=0.5"
        yield Finding("negotiation", text, None, advice)
    if shares.get(QUEUE, 0.0) >= _MUCH:
        text = f"during {shares[QUEUE]:.0%} of the time tensors only wait in Horovod's queue or for their data"
        yield Finding("queue", text, None, "on GPUs they wait for backward to produce them; there is nothing to be set")
    if shares.get(COPIES, 0.0) >= _MUCH / 4:
        text = f"copies into and out of the fusion buffer take {shares[COPIES]:.0%} of the time"
        advice = "flat buckets need none: import hvdtrain.torch as hvd in the place of horovod.torch"
        yield Finding("fusion_copies", text, None, advice)
    if shares.get(TRANSFER, 0.0) >= _MUCH:
        rate = communication.bus_gb_per_s if communication else None
        at = f" at {wording.speed(rate)} of bus bandwidth" if rate else ""
        text = (
            f"sums travel during {shares[TRANSFER]:.0%} of the time{at}; what backward hides of it is not in this file"
        )
        sent = communication.bytes_per_step if communication else None
        advice = "send less: compression=hvd.Compression.fp16 in DistributedOptimizer"
        if sent is not None and sent < _SMALL_BYTES:
            advice = f"only {wording.nbytes(sent)} a step: it is latency, not bytes; look for ranks that wait for cores"
        yield Finding("transfer", text, None, advice)
    yield from _small(many)
    if shares.get(IDLE, 0.0) >= 1 - _MUCH / 4:
        text = f"nothing is exchanged during {shares[IDLE]:.0%} of the time: communication is not what costs"
        yield Finding("idle", text, None, "look at the program itself: torch.profiler, or hvdtrain's own timeline")


def _cache(run: RunTrace) -> Iterator[Finding]:
    """Ticks are written where a tensor is negotiated in full: in late steps too, where the cache does not hold."""
    for trace in run.horovod:
        steps = steps_of(trace)
        if not len(trace.tick_tensor) or steps <= 2 * _TURNS_WITH_TICKS:
            continue
        ranks = int(trace.tick_rank.max()) + 1
        turns = np.bincount(trace.tick_tensor, minlength=len(trace.tensors)) / ranks
        full = int(np.sum(turns > _TURNS_WITH_TICKS))
        if full:
            text = (
                f"{full} tensors were negotiated in full again and again: Horovod's response cache does not hold them"
            )
            advice = f"HOROVOD_CACHE_CAPACITY={max(2048, 2 * len(trace.tensors))}, unless it was set to 0 to see this"
            yield Finding("cache", text, None, advice)
            return


def _collectives_a_step(run: RunTrace) -> tuple[float, float] | None:
    """How many collectives a step has, and of how many bytes each is in the mean; None where steps are not known."""
    steps = sum(map(steps_of, run.horovod))
    if not steps:
        return None
    known = [_known(trace) for trace in run.horovod]
    count = sum(len(each) for each in known)
    return count / steps, float(np.mean(np.concatenate(known))) if count else 0.0


def _known(trace: HorovodTrace) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.asarray(trace.nbytes[whole_collectives(trace) & (trace.nbytes >= 0)])


def _small(many: tuple[float, float] | None) -> Iterator[Finding]:
    if many is not None and many[0] >= _MANY and many[1] < _SMALL_BYTES:
        text = f"{many[0]:.0f} tensors a step of {many[1] / 1e3:.0f} kB in the mean are exchanged one by one or fused"
        advice = "let more travel together: HOROVOD_CYCLE_TIME=5 gathers for longer; or import hvdtrain.torch as hvd"
        yield Finding("small_tensors", text, None, advice)
