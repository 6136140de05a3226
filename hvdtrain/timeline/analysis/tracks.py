"""The tracks of a rank's spans. Pure."""

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
    """Return the time in spans of a name in the training thread."""
    mine = _is(spans, name) & (spans.track == MAIN)
    return union(spans.start_us[mine], spans.end_us[mine])


def exchange_of(spans: RankSpans) -> tuple[Span, int]:
    """Return the time during which any bucket was exchanged, and the number of steps."""
    mine = spans.track >= EXCHANGE
    return union(spans.start_us[mine], spans.end_us[mine]), len(np.unique(spans.step[mine]))


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


def _is(spans: RankSpans, name: str) -> NDArray[np.bool_]:
    return np.isin(spans.name, [i for i, each in enumerate(spans.names) if each == name])
