"""Timelines of any size as Horovod 0.28 writes them, for `timeline.py`.

The structure is that of traces recorded from stock jobs (those of tests/timeline/traces): tensors named once, each step
a negotiation of every gradient as backward makes it ready, ticks of ranks in the first steps only (in all without a
response cache), fused groups that go through the buffers together, sizes where a collective ends, cycle marks between.
Tensors are ResNet-50's, and a few others by names that JSON allows, so that `json.loads` can read them too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_EPOCH_US = 1_795_189_652_772_689
_GROUP = 23
_PHASES = ("MEMCPY_IN_FUSION_BUFFER", "MPI_ALLREDUCE", "MEMCPY_OUT_FUSION_BUFFER")
_ODD = ("metrics: top 5, [all]", "{loss}", "Größe/重み", "DistributedSGD_Allreduce/cond_3/HorovodAllreduce_grads_7_0")


@dataclass(frozen=True)
class Shape:
    """Of a trace.

    Attributes:
        ranks: that take part.
        ticks: steps, from the first, in which ranks' ticks stand.
        cycles: whether Horovod's cycles are marked.
    """

    ranks: int
    ticks: int
    cycles: bool


USUAL = Shape(ranks=8, ticks=3, cycles=True)
WITHOUT_CACHE = Shape(ranks=8, ticks=1 << 30, cycles=False)


def resnet_50() -> list[tuple[str, str]]:
    """Names and shapes of its parameters, the last first, as backward makes them ready."""
    found = [("conv1.weight", "[64, 3, 7, 7]"), ("bn1.weight", "[64]"), ("bn1.bias", "[64]")]
    before = 64
    for layer, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), start=1):
        for block in range(blocks):
            name = f"layer{layer}.{block}"
            sizes = ((width, before, 1), (width, width, 3), (4 * width, width, 1))
            for number, (out, given, kernel) in enumerate(sizes, start=1):
                found.append((f"{name}.conv{number}.weight", f"[{out}, {given}, {kernel}, {kernel}]"))
                found += [(f"{name}.bn{number}.{part}", f"[{out}]") for part in ("weight", "bias")]
            if block == 0:
                found.append((f"{name}.downsample.0.weight", f"[{4 * width}, {before}, 1, 1]"))
                found += [(f"{name}.downsample.1.{part}", f"[{4 * width}]") for part in ("weight", "bias")]
            before = 4 * width
    return [*found, ("fc.weight", "[1000, 2048]"), ("fc.bias", "[1000]")][::-1]


def write(path: Path, size_bytes: int, shape: Shape, seed: int = 0) -> None:
    """Write a trace of `size_bytes` and at most a step more."""
    tensors = [(f"allreduce.{name}", dims) for name, dims in resnet_50()] + [(name, "[]") for name in _ODD]
    random = np.random.default_rng(seed)
    now_us, step = 2_000_000, 0
    with path.open("w", encoding="utf-8") as file:
        file.write(
            '[\n{"name": "process_name", "ph": "M", "pid": 0, '
            f'"args": {{"start_time_since_epoch_in_micros":{_EPOCH_US}}}}},\n'
            '{"name": "process_sort_index", "ph": "M", "pid": 0, "args": {"sort_index": 0}},\n'
        )
        templates: dict[tuple[bool, bool], tuple[str, NDArray[np.float64]]] = {}
        while file.tell() < size_bytes:
            kind = (step == 0, step < shape.ticks)
            if kind not in templates:
                templates[kind] = _template(tensors, shape, named=kind[0], ticks=kind[1])
            text, waits = templates[kind]
            times = now_us + np.cumsum(random.poisson(waits))
            now_us = int(times[-1]) + 20_000
            file.write(("," if step else "") + text % tuple(times.tolist()))
            step += 1
        file.write("]")


def _template(
    tensors: Sequence[tuple[str, str]], shape: Shape, named: bool, ticks: bool
) -> tuple[str, NDArray[np.float64]]:
    """A step's events with a gap for each time, and the mean wait before each in microseconds."""
    events = list(_step(tensors, shape, ticks))
    parts = []
    seen: set[int] = set()
    for text, pid, _ in events:
        if named and pid and pid not in seen:
            seen.add(pid)
            name = tensors[pid - 1][0].replace("%", "%%")
            parts.append(
                f'{{"name": "process_name", "ph": "M", "pid": {pid}, "args": {{"name": "{name}"}}}},\n'
                f'{{"name": "process_sort_index", "ph": "M", "pid": {pid}, "args": {{"sort_index": {pid}}}}},\n{text}'
            )
        else:
            parts.append(text)
    return ",".join(parts), np.array([wait for *_, wait in events], dtype=np.float64)


def _step(tensors: Sequence[tuple[str, str]], shape: Shape, ticks: bool) -> Iterator[tuple[str, int, float]]:
    """Events of a step: text, tensor (0: none), mean wait before it in microseconds."""
    for first in range(0, len(tensors), _GROUP):
        group = range(first + 1, min(first + _GROUP, len(tensors)) + 1)
        for pid in group:
            yield f'{{"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": %d, "pid": {pid}}}', pid, 40.0
        if shape.cycles:
            yield '{"ph": "i", "name": "CYCLE_START", "ts": %d, "s": "g"}', 0, 300.0
        for pid in group:
            for rank in range(shape.ranks if ticks else 0):
                yield f'{{"ph": "X", "name": "{rank}", "ts": %d, "pid": {pid}, "dur": 0}}', pid, 3.0
            yield f'{{"ph": "E", "ts": %d, "pid": {pid}}}', pid, 0.5
        for pid in group:
            yield f'{{"ph": "B", "name": "ALLREDUCE", "ts": %d, "pid": {pid}}}', pid, 0.5
        for phase in _PHASES:
            for pid in group:
                yield f'{{"ph": "B", "name": "{phase}", "ts": %d, "pid": {pid}}}', pid, 0.5
            for place, pid in enumerate(group):
                yield f'{{"ph": "E", "ts": %d, "pid": {pid}}}', pid, 0.5 if place else 900.0
        for pid in group:
            size = f'"args": {{"dtype": "float32", "shape": "{tensors[pid - 1][1]}"}}'
            yield f'{{"ph": "E", "ts": %d, "pid": {pid}, {size}}}', pid, 1.0
