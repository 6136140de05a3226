"""The gradient exchange: duration, hidden share, bandwidth; the most expensive buckets and tensors. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np

from hvdtrain.compression.sizes import Bucket
from hvdtrain.compression.table import parse
from hvdtrain.errors import ConfigError
from hvdtrain.observe.cost import as_mapping
from hvdtrain.spans import EXCHANGE, MAIN
from hvdtrain.timeline.analysis import phases
from hvdtrain.timeline.analysis.analysis import Carrier, Communication, Estimate, Part
from hvdtrain.timeline.columns import BucketFacts, Floats, HorovodTrace, RankSpans, RunTrace, StepTable

_UNKNOWN_SHARE = 0.02
"""If collectives of unknown size take more than this share of the time, the bandwidth is unknown."""
_TURNS_A_STEP = 1.5


def measure_communication(run: RunTrace) -> Communication | None:
    """Return the exchange as Horovod's Timelines or else rank 0's spans show it; None without either."""
    return _of_timelines(run) if any(len(trace.start_us) for trace in run.horovod) else _of_spans(run)


def bus_bytes(operation: str, nbytes: float, size: int) -> float:
    """Return the bytes that a rank sends, and also receives, in a collective. Per second it is NCCL's bus bandwidth.

    nccl-tests, doc/PERFORMANCE.md: 2 (n - 1) / n of the bytes of an allreduce, n - 1 times the input of an
    allgather, (n - 1) / n of an alltoall or reducescatter, all of a broadcast.
    """
    factors = {"ALLREDUCE": 2 * (size - 1) / size, "ALLGATHER": size - 1.0, "BROADCAST": 1.0}
    return nbytes * factors.get(operation, (size - 1) / size)


def link_gb_per_s(link: Sequence[tuple[int, float]], size: int) -> float | None:
    """Return the bus bandwidth of the largest allreduce of the link probe, in 1e9 bytes per second."""
    measured = [(nbytes, seconds) for nbytes, seconds in link if seconds > 0]
    if not measured or size < 2:
        return None
    nbytes, seconds = max(measured)
    return bus_bytes("ALLREDUCE", nbytes, size) / seconds / 1e9


def _of_timelines(run: RunTrace) -> Communication:
    in_phase = phases.by_kind(run.horovod)
    covered = [_steps_in(trace, run.steps) for trace in run.horovod]
    steps = sum(covered) if all(covered) else 0
    each = max(1, steps)
    busy = phases.together(in_phase[name] for name in phases.PHASES)
    parts = [(name, ms) for name in phases.PHASES if (ms := phases.length(in_phase[name]) / 1e3 / each) > 0]
    busy_ms = phases.length(busy) / 1e3 / each or None
    moved, on_bus = _bytes_of(run.horovod, run.size) or (None, None)
    transfer = phases.length(in_phase[phases.TRANSFER]) / 1e6
    return Communication(
        [Part(name, Estimate(ms, ms, ms), ms / busy_ms if busy_ms else 0.0) for name, ms in parts],
        busy_ms,
        _hidden(busy, run.steps) if run.steps is not None else None,
        (moved / each or None if moved is not None else _coded(run)) if steps else None,
        on_bus / transfer / 1e9 if transfer and on_bus else None,
        link_gb_per_s(run.link, run.size),
    )


def _steps_in(trace: HorovodTrace, table: StepTable | None) -> int:
    """Return the number of steps in a Timeline, by how often tensors recur, else by stamps; 0 if unknown.

    Stamps do not cover every step, but they detect tensors that recur several times per step.
    """
    turns = phases.count_steps(trace)
    if table is None or not len(table.step):
        return turns
    first, last = (_step_at(table, us) for us in phases.extent(trace))
    by_stamps = last - max(first, 1) + 1
    return turns if 0 < turns <= _TURNS_A_STEP * by_stamps + 1 or by_stamps < 1 else by_stamps


def _step_at(table: StepTable, us: float) -> int:
    """Return rank 0's step at a time; between and beyond recorded steps by interpolation."""
    starts: Floats = table.start_us[0]
    steps = table.step[-1] - table.step[0] + 1
    mean = max(1.0, float(table.end_us[0, -1] - starts[0]) / float(steps))
    beyond = min(0.0, us - starts[0]) / mean + max(0.0, us - starts[-1]) / mean
    return int(np.floor(np.interp(us, starts, table.step) + beyond))


def _bytes_of(traces: Sequence[HorovodTrace], size: int) -> tuple[float, float] | None:
    """Return the bytes that a rank passed to collectives and those on the bus; None if too many are unknown."""
    moved = on_bus = took = unknown = 0.0
    for trace in traces:
        whole = phases.whole_collectives(trace)
        for number in np.unique(trace.phase[whole]):
            name, mine = trace.phases[number], whole & (trace.phase == number)
            sized = mine & (trace.nbytes >= 0)
            if name in ("JOIN", "BARRIER"):
                continue
            nbytes = handed_over(name, float(trace.nbytes[sized].sum()), size)
            took += float(trace.duration_us[mine].sum())
            unknown += float(trace.duration_us[mine & ~sized if nbytes is not None else mine].sum())
            moved += nbytes or 0.0
            on_bus += bus_bytes(name, nbytes or 0.0, size) if size > 1 else 0.0
    return (moved, on_bus) if unknown <= _UNKNOWN_SHARE * took else None


def handed_over(operation: str, nbytes: float, size: int) -> float | None:
    """Return the input bytes of a collective from those of its result, `nbytes` in Horovod's Timeline.

    The result of an allgather has the inputs of all ranks, that of a reducescatter one rank's share. None if the number
    of ranks is needed and unknown.
    """
    if operation not in ("ALLGATHER", "REDUCESCATTER"):
        return nbytes
    if not size:
        return None
    return nbytes / size if operation == "ALLGATHER" else nbytes * size


def _hidden(busy: phases.Span, table: StepTable) -> float | None:
    """Return the share of `busy` within recorded steps during which rank 0 did not wait."""
    inside = phases.common(busy, phases.union(table.start_us[0], table.end_us[0]))
    if not phases.length(inside):
        return None
    waiting = phases.union(table.ready_us[0], table.released_us[0])
    return 1 - phases.length(phases.common(inside, waiting)) / phases.length(inside)


def _of_spans(run: RunTrace) -> Communication | None:
    ours = run.spans_of_rank_0
    if ours is None:
        return None
    mine = ours.track >= EXCHANGE
    exchange, steps = phases.union(ours.start_us[mine], ours.end_us[mine]), max(1, len(np.unique(ours.step[mine])))
    busy = phases.length(exchange) / 1e3 / steps
    if not busy:
        return None
    waiting = phases.length(phases.common(exchange, waiting_of(ours))) / 1e3 / steps
    return Communication([], busy, 1 - waiting / busy, _handed_over(run), None, link_gb_per_s(run.link, run.size))


def waiting_of(spans: RankSpans) -> phases.Span:
    """Return the time during which the training thread waited for sums."""
    mine = spans.named("wait") & (spans.track == MAIN)
    return phases.union(spans.start_us[mine], spans.end_us[mine])


def _coded(run: RunTrace) -> float | None:
    """Return bytes per step from the buckets if the Timeline lacks sizes of bucket collectives only; else None."""
    ours = run.spans_of_rank_0
    names = [f"{facts.name}/" for facts in ours.buckets.values()] if ours is not None else []
    took = unknown = 0.0
    for trace in run.horovod:
        whole = phases.whole_collectives(trace)
        others = np.array([not any(name in f"{tensor}/" for name in names) for tensor in trace.tensors], bool)
        took += float(trace.duration_us[whole].sum())
        unknown += float(trace.duration_us[whole & (trace.nbytes < 0) & others[trace.tensor]].sum())
    return _handed_over(run) if unknown <= _UNKNOWN_SHARE * took else None


def _handed_over(run: RunTrace) -> float | None:
    """Return compressed bytes per step of all of rank 0's buckets; None if unknown."""
    ours = run.spans_of_rank_0
    found = [payload_bytes(facts, run) for facts in ours.buckets.values()] if ours is not None else []
    known = [nbytes for nbytes in found if nbytes is not None]
    return float(sum(known)) or None if len(known) == len(found) else None


def payload_bytes(facts: BucketFacts, run: RunTrace) -> int | None:
    """Return the bytes that a rank passes to collectives per exchange of a bucket; None if unknown."""
    asked = as_mapping(run.config.get("parallel")).get("compression")
    try:
        compression = parse("none" if asked is None else str(asked))
        payload = compression.payload(Bucket(facts.shapes, facts.dtype, facts.length), max(1, run.size))
    except (ConfigError, KeyError):  # "auto", say, or a dtype of another version
        return None
    return sum(payload.values())


MOST = 10
_MOST_MODULES = 3


def top_carriers(run: RunTrace) -> list[Carrier]:
    """Return the ten most expensive, by exposed time and then duration; from our spans if there are any."""
    ours = run.spans_of_rank_0
    found = list(_carriers_of_spans(ours, run)) if ours is not None else []
    if not found:
        found = [carrier for trace in run.horovod[-1:] for carrier in _carriers_of_timeline(trace)]
    return sorted(found, key=lambda c: (-(c.exposed_ms or 0.0), -c.ms))[:MOST]


def _carriers_of_spans(spans: RankSpans, run: RunTrace) -> Iterator[Carrier]:
    waiting = waiting_of(spans)
    if run.steps is not None:  # until the last rank is ready, it waits for that rank
        waiting = phases.without(waiting, phases.union(run.steps.ready_us[0], run.steps.ready_us.max(axis=0)))
    for track in np.unique(spans.track[spans.track >= EXCHANGE]):
        mine = spans.track == track
        steps = max(1, len(np.unique(spans.step[mine])))
        under_way = phases.union(spans.start_us[mine], spans.end_us[mine])
        facts: BucketFacts | None = spans.buckets.get(int(track))
        yield Carrier(
            facts.name if facts else f"bucket {track - EXCHANGE}",
            modules_of(facts.parameters) if facts else [],
            payload_bytes(facts, run) if facts else None,
            phases.length(under_way) / 1e3 / steps,
            phases.length(phases.common(under_way, waiting)) / 1e3 / steps,
        )


def _carriers_of_timeline(trace: HorovodTrace) -> Iterator[Carrier]:
    steps = max(1, phases.count_steps(trace))
    mine = phases.of_kind(trace, "", phases.NEGOTIATION)
    total = np.bincount(trace.tensor[mine], weights=trace.duration_us[mine], minlength=len(trace.tensors))
    nbytes = np.full(len(trace.tensors), -1, np.int64)
    np.maximum.at(nbytes, trace.tensor, trace.nbytes)
    total[~phases.recurring(trace)] = 0.0
    most = np.argsort(-total, kind="stable")[:MOST]
    for i in most[total[most] > 0]:
        name, size = trace.tensors[i], int(nbytes[i]) if nbytes[i] >= 0 else None
        yield Carrier(name, [tensor_module(name)], size, float(total[i]) / 1e3 / steps, None)


def modules_of(parameters: Sequence[str]) -> list[str]:
    """Return the modules of parameters, shortened to at most three names.

    ``layers.0.attn.weight, layers.0.mlp.weight`` become ``layers.0``; a list that stays long ends in "and 4 more".
    """
    paths = [name.split(".")[:-1] or [name] for name in parameters]
    for depth in range(max(map(len, paths), default=0), 0, -1):
        names = list(dict.fromkeys(".".join(path[:depth]) for path in paths))
        if len(names) <= _MOST_MODULES:
            return names
    return [*names[: _MOST_MODULES - 1], f"and {len(names) - _MOST_MODULES + 1} more"] if paths else []


def tensor_module(name: str) -> str:
    """Guess a parameter's module from the name of a Horovod tensor."""
    bare = re.sub(r"^(allreduce|allgather|broadcast|alltoall|reducescatter)\.", "", name)
    bare = re.sub(r"^(Distributed\w+?[./](Allreduce[./])?|grad\.|HorovodAllreduce_)", "", bare)
    return bare.rsplit(".", 1)[0] if re.search(r"\.(weight|bias)$", bare) else bare
