"""The exchange: how long, how much of it hidden, how fast. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hvdtrain.compression.sizes import Bucket
from hvdtrain.compression.table import Compression, parse
from hvdtrain.errors import ConfigError
from hvdtrain.timeline.analysis.analysis import Communication, Estimate, Part
from hvdtrain.timeline.analysis.intervals import Span, common, length, union
from hvdtrain.timeline.analysis.phases import PHASES, TRANSFER, by_kind, extent, steps_of, whole_collectives
from hvdtrain.timeline.analysis.tracks import exchange_of, spans_named
from hvdtrain.timeline.columns import BucketFacts, Floats, HorovodTrace, RunTrace, StepTable

_UNKNOWN_SHARE = 0.02
"""Of the time of collectives, that of those whose bytes are not told: of more, their bandwidth is not known."""
_TURNS_A_STEP = 1.5


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
    moved, on_bus = _bytes_of(run.horovod, run.size) or (None, None)
    transfer = length(phases[TRANSFER]) / 1e6 if TRANSFER in phases else 0.0
    return Communication(
        [Part(name, Estimate(ms, ms, ms), ms / busy_ms if busy_ms else 0.0) for name, ms in parts],
        busy_ms,
        _hidden(busy, run.steps) if busy is not None and run.steps is not None else None,
        (moved / each or None if moved is not None else _coded(run)) if steps else None,
        on_bus / transfer / 1e9 if transfer and on_bus else None,
        link_gb_per_s(run.link, run.size),
    )


def _steps_covered(run: RunTrace) -> int:
    """Steps that lie in the Timelines: by how often tensors come again, else by the stamps; 0 where nothing tells.

    Stamps are not there of every step, and their moments are not those of the Timeline's events; but they tell tensors
    that come several times a step.
    """
    return sum(found) if all(found := [_steps_in(trace, run.steps) for trace in run.horovod]) else 0


def _steps_in(trace: HorovodTrace, table: StepTable | None) -> int:
    turns = steps_of(trace)
    if table is None or not len(table.step):
        return turns
    first, last = (_step_at(table, us) for us in extent(trace))
    by_stamps = last - max(first, 1) + 1
    return turns if 0 < turns <= _TURNS_A_STEP * by_stamps + 1 or by_stamps < 1 else by_stamps


def _step_at(table: StepTable, us: float) -> int:
    """The step that rank 0 was in; between and beyond stamped ones as if all took as long."""
    starts: Floats = table.start_us[0]
    steps = table.step[-1] - table.step[0] + 1
    mean = max(1.0, float(table.end_us[0, -1] - starts[0]) / float(steps))
    beyond = min(0.0, us - starts[0]) / mean + max(0.0, us - starts[-1]) / mean
    return int(np.floor(np.interp(us, starts, table.step) + beyond))


def _bytes_of(traces: Sequence[HorovodTrace], size: int) -> tuple[float, float] | None:
    """Bytes that a rank handed over in all, and what it had to send of them; None where not all are told."""
    moved = on_bus = took = unknown = 0.0
    for trace in traces:
        whole = whole_collectives(trace)
        for number in np.unique(trace.phase[whole]):
            name, mine = trace.phases[number], whole & (trace.phase == number)
            told = mine & (trace.nbytes >= 0)
            if name in ("JOIN", "BARRIER"):
                continue
            nbytes = handed_over(name, float(trace.nbytes[told].sum()), size)
            took += float(trace.duration_us[mine].sum())
            unknown += float(trace.duration_us[mine & ~told if nbytes is not None else mine].sum())
            moved += nbytes or 0.0
            on_bus += bus_bytes(name, nbytes or 0.0, size) if size > 1 else 0.0
    return (moved, on_bus) if unknown <= _UNKNOWN_SHARE * took else None


def handed_over(operation: str, nbytes: float, size: int) -> float | None:
    """What a rank gives to a collective of which Horovod's Timeline tells `nbytes`, those of the result.

    An allgather's result is what all ranks gave, a reducescatter's one rank's share of the sum. None where that takes
    the number of ranks, which is not known.
    """
    if operation not in ("ALLGATHER", "REDUCESCATTER"):
        return nbytes
    if not size:
        return None
    return nbytes / size if operation == "ALLGATHER" else nbytes * size


def _hidden(busy: Span, table: StepTable) -> float | None:
    """The share of `busy` in the stamped steps in which rank 0 did not wait."""
    steps = union(table.start_us[0], table.end_us[0])
    inside = common(busy, steps)
    if not length(inside):
        return None
    waiting = union(table.ready_us[0], table.released_us[0])
    return 1 - length(common(inside, waiting)) / length(inside)


def _of_spans(run: RunTrace) -> Communication | None:
    ours = run.spans_of_rank_0
    if ours is None:
        return None
    exchange, steps = exchange_of(ours)
    busy = length(exchange) / 1e3 / max(1, steps)
    if not busy:
        return None
    waiting = length(common(exchange, spans_named(ours, "wait"))) / 1e3 / max(1, steps)
    return Communication([], busy, 1 - waiting / busy, _handed_over(run), None, link_gb_per_s(run.link, run.size))


def _coded(run: RunTrace) -> float | None:
    """Bytes a step of a run of whose collectives Horovod does not tell all; None where those are not of its buckets."""
    ours = run.spans_of_rank_0
    names = [f"{facts.name}/" for facts in ours.buckets.values()] if ours is not None else []
    took = unknown = 0.0
    for trace in run.horovod:
        whole = whole_collectives(trace)
        others = np.array([not any(name in f"{tensor}/" for name in names) for tensor in trace.tensors], bool)
        took += float(trace.duration_us[whole].sum())
        unknown += float(trace.duration_us[whole & (trace.nbytes < 0) & others[trace.tensor]].sum())
    return _handed_over(run) if unknown <= _UNKNOWN_SHARE * took else None


def _handed_over(run: RunTrace) -> float | None:
    """Bytes a step of all of rank 0's buckets, as they are compressed."""
    ours = run.spans_of_rank_0
    found = [payload_bytes(facts, run) for facts in ours.buckets.values()] if ours is not None else []
    known = [nbytes for nbytes in found if nbytes is not None]
    return float(sum(known)) or None if len(known) == len(found) else None


def payload_bytes(facts: BucketFacts, run: RunTrace) -> int | None:
    """What a rank hands to collectives in one exchange of a bucket; None where the compression is not known."""
    parallel = run.config.get("parallel")
    asked = parallel.get("compression") if isinstance(parallel, Mapping) else None
    try:
        compression = parse(str(asked)) if asked is not None else Compression.none()
        payload = compression.payload(Bucket(facts.shapes, facts.dtype, facts.length), max(1, run.size))
    except (ConfigError, KeyError):  # "auto", say, or a dtype of another version
        return None
    return sum(payload.values())


def item_bytes(dtype: str) -> int:
    """Bytes of an element of a bucket."""
    return {"float64": 8, "bfloat16": 2, "float16": 2}.get(dtype, 4)
