"""A few steps of all ranks as lanes of a picture. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hvdtrain.spans import DEVICE, EXCHANGE, MAIN
from hvdtrain.timeline.analysis.analysis import Lane, Slice
from hvdtrain.timeline.analysis.phases import TRANSFER, by_kind, union
from hvdtrain.timeline.columns import Floats, HorovodTrace, Ints, RankSpans, RunTrace

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
    horovod = run.horovod if run.spans else run.horovod[-1:]
    windows = _windows(run.spans, list(turns)[:_MOST_TURNS]) if run.spans else list(map(_middle, horovod))
    found: dict[str, list[Slice]] = defaultdict(list)
    before, place = 0.0, 0.0
    for window in windows:
        length = window.end - window.begin
        place += _GAP * max(before, length) if before else 0.0
        for spans in sorted(run.spans, key=lambda spans: spans.rank):
            for label, slices in _of_rank(spans, window, place):
                found[label] += slices
        for trace in horovod:
            start, end = by_kind([trace])[TRANSFER]
            unknown = np.zeros(len(start), np.int32)
            found["Horovod"] += _slices(window, place, ["transfer"] * len(start), unknown, start, end)
        before, place = length, place + length
    return [Lane(label, slices) for label, slices in found.items() if slices]


def _windows(ranks: Sequence[RankSpans], turns: Sequence[int]) -> list[_Window]:
    """Return the windows to show, by step; they do not overlap."""
    mine = [(r.track == MAIN) & (r.step > 0) & r.named("step") for r in ranks]
    step, start, end = (
        np.concatenate([getattr(r, column)[m] for r, m in zip(ranks, mine, strict=True)])
        for column in ("step", "start_us", "end_us")
    )
    numbers, place = np.unique(step, return_inverse=True)
    first, last = np.full(len(numbers), np.inf), np.full(len(numbers), -np.inf)
    np.minimum.at(first, place, start)
    np.maximum.at(last, place, end)
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
    each = np.split(places, np.flatnonzero(np.diff(numbers[places]) > 1) + 1)
    ends = [(int(window[0]), int(window[-1])) for window in each]
    return [_Window(int(numbers[a]), int(numbers[b]), float(first[a]), float(last[b])) for a, b in ends]


def _middle(trace: HorovodTrace) -> _Window:
    """Return the middle of a Timeline: four exchanges of its most frequent tensor."""
    if not len(trace.start_us):
        return _Window(0, 0, 0.0, 0.0)
    tensor = int(np.bincount(trace.tensor).argmax())
    turns: Floats = np.sort(trace.start_us[trace.tensor == tensor])
    middle = len(turns) // 2
    begin, end = float(turns[middle]), float(turns[min(len(turns) - 1, middle + STEPS)])
    return _Window(0, 0, begin, end if end > begin else begin + float(trace.duration_us.max()))


def _of_rank(spans: RankSpans, window: _Window, place: float) -> Iterator[tuple[str, list[Slice]]]:
    inside = (spans.step >= window.first) & (spans.step <= window.last)
    for label, track in ((f"rank {spans.rank} on {spans.host}", MAIN), (f"rank {spans.rank}, device", DEVICE)):
        mine = inside & (spans.track == track) & ~((track == MAIN) & spans.named("step"))
        names = [spans.names[number] for number in spans.name[mine]]
        yield label, _slices(window, place, names, spans.step[mine], spans.start_us[mine], spans.end_us[mine])
    mine = inside & (spans.track >= EXCHANGE)
    start, end = union(spans.start_us[mine], spans.end_us[mine])
    step = np.sort(spans.step[mine])[np.searchsorted(np.sort(spans.start_us[mine]), start)]
    yield f"rank {spans.rank}, exchange", _slices(window, place, ["exchange"] * len(start), step, start, end)


def _slices(window: _Window, place: float, names: Sequence[str], step: Ints, start: Floats, end: Floats) -> list[Slice]:
    """Return the longest of the spans within a window, clipped to it; the window begins at `place` of the picture."""
    inside = np.flatnonzero((end > window.begin) & (start < window.end))
    kept = inside[np.argsort(-(end - start)[inside], kind="stable")[:_MOST_SLICES]]
    kept = kept[np.lexsort((-end[kept], start[kept]))]
    moments = [(np.clip(each[kept], window.begin, window.end) - window.begin + place) / 1e3 for each in (start, end)]
    rows = zip(kept.tolist(), *(each.tolist() for each in moments), strict=True)
    return [Slice(names[i], begins, ends, int(step[i])) for i, begins, ends in rows]
