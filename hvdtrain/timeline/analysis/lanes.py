"""A few steps of all ranks as lanes of a picture. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvdtrain.spans import DEVICE, EXCHANGE, MAIN
from hvdtrain.timeline.analysis.analysis import Lane, Slice
from hvdtrain.timeline.analysis.intervals import union
from hvdtrain.timeline.analysis.phases import TRANSFER, of_kind
from hvdtrain.timeline.columns import Floats, HorovodTrace, RankSpans, RunTrace

STEPS = 4
_MOST_SLICES = 400
"""Per lane and window; the longest ones are kept."""
_AROUND = 2
"""Steps before, and after, a turn."""
_MOST_TURNS = 8
_GAP = 0.02
"""Between two windows, of the longer one."""


class _Window(NamedTuple):
    """First and last step, begin and end in us."""

    first: int
    last: int
    begin: float
    end: float


def window_lanes(run: RunTrace, turns: Iterable[int] = ()) -> list[Lane]:
    """Return four consecutive recorded steps that are slow but not exceptional; or four steps of a Timeline alone.

    Further windows of a run, one after the other, have the recorded steps around each of `turns`.
    """
    if not run.spans:
        return [lane for trace in run.horovod[-1:] if (lane := _alone(trace)) is not None]
    found: dict[str, list[Slice]] = {}
    before = shift = 0.0
    for window in _windows(run.spans, list(turns)[:_MOST_TURNS]):
        length = (window.end - window.begin) / 1e3
        shift += _GAP * max(before, length) if before else 0.0
        for lane in _of_window(run, window):
            moved = [replace(s, start_ms=s.start_ms + shift, end_ms=s.end_ms + shift) for s in lane.slices]
            found.setdefault(lane.label, []).extend(moved)
        before, shift = length, shift + length
    return [Lane(label, slices) for label, slices in found.items()]


def _of_window(run: RunTrace, window: _Window) -> list[Lane]:
    lanes = []
    for spans in sorted(run.spans, key=lambda spans: spans.rank):
        lanes += _of_rank(spans, *window)
    slices = [each for trace in run.horovod for each in _transfer(trace, window.begin, window.end)]
    return [*lanes, Lane("Horovod", slices)] if slices else lanes


def _windows(ranks: Sequence[RankSpans], turns: Sequence[int]) -> list[_Window]:
    """Return the windows to show, by step; they do not overlap."""
    mine = [(r.track == MAIN) & (r.step > 0) & r.named("step") for r in ranks]
    step = np.concatenate([r.step[m] for r, m in zip(ranks, mine, strict=True)])
    numbers, place = np.unique(step, return_inverse=True)
    first, last = np.full(len(numbers), np.inf), np.full(len(numbers), -np.inf)
    np.minimum.at(first, place, np.concatenate([r.start_us[m] for r, m in zip(ranks, mine, strict=True)]))
    np.maximum.at(last, place, np.concatenate([r.end_us[m] for r, m in zip(ranks, mine, strict=True)]))
    skipped = 1 if len(numbers) > STEPS + 1 else 0  # the first step of a run is special
    numbers, first, last = numbers[skipped:], first[skipped:], last[skipped:]
    if not len(numbers):
        return []
    ahead = min(STEPS, len(numbers)) - 1
    whole = np.flatnonzero(numbers[ahead:] - numbers[: len(numbers) - ahead] == ahead)
    if not len(whole):
        ahead, whole = 0, np.array([0])
    long = last[whole + ahead] - first[whole]
    # The upper quartile: slow, but not exceptional as a pause is.
    begin = int(whole[np.argsort(long, kind="stable")[int(0.75 * (len(whole) - 1))]])
    kept = set(range(begin, begin + ahead + 1))
    for turn in turns:
        near = int(np.argmin(np.abs(numbers - turn)))
        if abs(int(numbers[near]) - turn) <= _AROUND:
            kept |= set(range(max(0, near - _AROUND), min(len(numbers), near + _AROUND + 1)))
    places = np.array(sorted(kept))
    edges = [0, *(np.flatnonzero(np.diff(numbers[places]) > 1) + 1).tolist(), len(places)]
    ends = [(int(places[a]), int(places[b - 1])) for a, b in pairwise(edges)]
    return [_Window(int(numbers[a]), int(numbers[b]), float(first[a]), float(last[b])) for a, b in ends]


def _of_rank(spans: RankSpans, first: int, last: int, begin: float, end: float) -> list[Lane]:
    inside = (spans.step >= first) & (spans.step <= last) & (spans.start_us < end) & (spans.end_us > begin)
    label = f"rank {spans.rank} on {spans.host}"
    lanes = [(label, inside & (spans.track == MAIN) & ~spans.named("step"))]
    lanes.append((f"rank {spans.rank}, device", inside & (spans.track == DEVICE)))
    found = [Lane(name, _slices(spans, mine, begin, end)) for name, mine in lanes if mine.any()]
    exchange = inside & (spans.track >= EXCHANGE)
    if exchange.any():
        starts, ends = union(spans.start_us[exchange], spans.end_us[exchange])
        steps = np.sort(spans.step[exchange])
        place = np.searchsorted(np.sort(spans.start_us[exchange]), starts)
        slices = [
            Slice("exchange", *_inside(a, b, begin, end), int(steps[min(i, len(steps) - 1)]))
            for a, b, i in zip(starts, ends, place, strict=True)
        ]
        found.append(Lane(f"rank {spans.rank}, exchange", slices))
    return found


def _inside(start: float, stop: float, begin: float, end: float) -> tuple[float, float]:
    """Clip a span to the picture; milliseconds from its begin."""
    return float(max(start, begin) - begin) / 1e3, float(min(stop, end) - begin) / 1e3


def _longest(length: Floats) -> NDArray[np.intp]:
    """Return indices of the longest `_MOST_SLICES`, in order."""
    return np.sort(np.argsort(-length, kind="stable")[:_MOST_SLICES])


def _slices(spans: RankSpans, mine: NDArray[np.bool_], begin: float, end: float) -> list[Slice]:
    places = np.flatnonzero(mine)
    places = places[_longest(spans.end_us[places] - spans.start_us[places])]
    places = places[np.lexsort((-spans.end_us[places], spans.start_us[places]))]
    return [
        Slice(
            spans.names[spans.name[i]],
            *_inside(spans.start_us[i], spans.end_us[i], begin, end),
            int(spans.step[i]),
        )
        for i in places
    ]


def _transfer(trace: HorovodTrace, begin: float, end: float) -> list[Slice]:
    mine = of_kind(trace, TRANSFER)
    starts, ends = union(trace.start_us[mine], (trace.start_us + trace.duration_us)[mine])
    inside = np.flatnonzero((ends > begin) & (starts < end))
    inside = inside[_longest((ends - starts)[inside])]
    return [Slice("transfer", *_inside(starts[i], ends[i], begin, end), 0) for i in inside]


def _alone(trace: HorovodTrace) -> Lane | None:
    """Return the middle of a Timeline: four exchanges of its most frequent tensor."""
    if not len(trace.start_us):
        return None
    tensor = int(np.bincount(trace.tensor).argmax())
    turns: Floats = np.sort(trace.start_us[trace.tensor == tensor])
    middle = len(turns) // 2
    begin, end = float(turns[middle]), float(turns[min(len(turns) - 1, middle + STEPS)])
    if end <= begin:
        end = begin + float(trace.duration_us.max())
    slices = _transfer(trace, begin, end)
    return Lane("Horovod", slices) if slices else None
