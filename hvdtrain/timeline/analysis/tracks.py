"""What a rank's spans hold, track by track. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hvdtrain.spans import EXCHANGE, MAIN
from hvdtrain.timeline.analysis.intervals import Span, union
from hvdtrain.timeline.columns import RankSpans

_MOST_MODULES = 3


def spans_named(spans: RankSpans, name: str) -> Span:
    """When the training thread was in spans of a name."""
    mine = _is(spans, name) & (spans.track == MAIN)
    return union(spans.start_us[mine], spans.end_us[mine])


def exchange_of(spans: RankSpans) -> tuple[Span, int]:
    """When any bucket was on its way, and in how many steps."""
    mine = spans.track >= EXCHANGE
    return union(spans.start_us[mine], spans.end_us[mine]), len(np.unique(spans.step[mine]))


def modules_of(parameters: Sequence[str]) -> list[str]:
    """Whose parameters these are: names of modules, shortened until three at most are left.

    ``layers.0.attn.weight, layers.0.mlp.weight`` become ``layers.0``; what cannot be shortened ends in "and 4 more".
    """
    paths = [name.split(".")[:-1] or [name] for name in parameters]
    for depth in range(max(map(len, paths), default=0), 0, -1):
        names = list(dict.fromkeys(".".join(path[:depth]) for path in paths))
        if len(names) <= _MOST_MODULES:
            return names
    return [*names[: _MOST_MODULES - 1], f"and {len(names) - _MOST_MODULES + 1} more"] if paths else []


def tensor_module(name: str) -> str:
    """The module of a parameter that a Horovod program exchanges by itself, as far as its tensor's name tells."""
    bare = re.sub(r"^(allreduce|allgather|broadcast|alltoall|reducescatter)\.", "", name)
    bare = re.sub(r"^(Distributed\w+?[./](Allreduce[./])?|grad\.|HorovodAllreduce_)", "", bare)
    return bare.rsplit(".", 1)[0] if re.search(r"\.(weight|bias)$", bare) else bare


def _is(spans: RankSpans, name: str) -> NDArray[np.bool_]:
    return np.isin(spans.name, [i for i, each in enumerate(spans.names) if each == name])
