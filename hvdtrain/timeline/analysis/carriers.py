"""The most expensive buckets and tensors, with their modules. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from hvdtrain.spans import EXCHANGE
from hvdtrain.timeline.analysis.analysis import Carrier
from hvdtrain.timeline.analysis.communication import payload_bytes, waiting_of
from hvdtrain.timeline.analysis.intervals import common, length, union
from hvdtrain.timeline.analysis.phases import NEGOTIATION, count_steps, of_kind, recurring
from hvdtrain.timeline.columns import BucketFacts, HorovodTrace, RankSpans, RunTrace

MOST = 10
_MOST_MODULES = 3


def top_carriers(run: RunTrace) -> list[Carrier]:
    """Return the ten most expensive, by exposed time and then duration; from our spans if there are any."""
    ours = run.spans_of_rank_0
    found = _of_spans(ours, run) if ours is not None else []
    if not found:
        found = [carrier for trace in run.horovod[-1:] for carrier in _of_timeline(trace)]
    return sorted(found, key=lambda c: (-(c.exposed_ms or 0.0), -c.ms))[:MOST]


def _of_spans(spans: RankSpans, run: RunTrace) -> list[Carrier]:
    waiting = waiting_of(spans)
    found = []
    for track in np.unique(spans.track[spans.track >= EXCHANGE]):
        mine = spans.track == track
        steps = max(1, len(np.unique(spans.step[mine])))
        under_way = union(spans.start_us[mine], spans.end_us[mine])
        facts: BucketFacts | None = spans.buckets.get(int(track))
        found.append(
            Carrier(
                facts.name if facts else f"bucket {track - EXCHANGE}",
                modules_of(facts.parameters) if facts else [],
                payload_bytes(facts, run) if facts else None,
                length(under_way) / 1e3 / steps,
                length(common(under_way, waiting)) / 1e3 / steps,
            )
        )
    return found


def _of_timeline(trace: HorovodTrace) -> list[Carrier]:
    steps = max(1, count_steps(trace))
    mine = of_kind(trace, "", NEGOTIATION)
    total = np.bincount(trace.tensor[mine], weights=trace.duration_us[mine], minlength=len(trace.tensors))
    nbytes = np.full(len(trace.tensors), -1, np.int64)
    np.maximum.at(nbytes, trace.tensor, trace.nbytes)
    total[~recurring(trace)] = 0.0
    most = np.argsort(-total, kind="stable")[:MOST]
    return [
        Carrier(
            trace.tensors[i],
            [tensor_module(trace.tensors[i])],
            int(nbytes[i]) if nbytes[i] >= 0 else None,
            float(total[i]) / 1e3 / steps,
            None,
        )
        for i in most
        if total[i] > 0
    ]


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
