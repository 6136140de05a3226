"""Reads ``steps.jsonl``: every rank's stamps of its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from hvdtrain.errors import DataError
from hvdtrain.run_layout import RunLayout, TimelineLayout
from hvdtrain.timeline.columns import PARTS, Floats, StepTable

_VERSION = 1
_MOMENTS = ("start_us", "ready_us", "released_us", "end_us")


@dataclass(frozen=True)
class Start:
    """One start of a run.

    Attributes:
        number: counted from 0; -1 where its line is damaged.
        at_step: the step that it went on from.
        origin_us: of the file's times, by rank 0's clock.
        clock_ids: of the ranks; equal ones are one clock.
        link: pairs of bytes and seconds of an allreduce, measured at the start.
        steps: empty where it was over before any were told.
        clock_us: times by rank 0's clock at which offsets are known [k].
        offset_us: what made a rank's times rank 0's then, NaN where unknown [k, ranks].
        error_us: by how much that may be wrong [k, ranks].
        dropped: lines that could not be used, in plain words.
    """

    number: int
    at_step: int
    origin_us: float
    clock_ids: Sequence[str]
    link: Sequence[tuple[int, float]]
    steps: StepTable
    clock_us: Floats
    offset_us: Floats
    error_us: Floats
    dropped: Sequence[str]


def read_steps(path: Path) -> list[StepTable]:
    """The stamps of a run, one table a start that left any, in order; times by rank 0's clock.

    Args:
        path: of the file, of the folder it is in, or of the run.
    """
    return [start.steps for start in read_starts(path) if len(start.steps.step)]


def read_starts(path: Path) -> list[Start]:
    """All that the file tells, one entry a start. What is no line of it is passed over and said in `dropped`.

    Args:
        path: of the file, of the folder it is in, or of the run. Where there is none, nothing is found.

    Errors:
        DataError: a newer version of this program wrote it.
    """
    found: list[Start] = []
    heads: list[tuple[Mapping[str, Any], list[Mapping[str, Any]], list[str]]] = []
    for number, raw in enumerate(_lines(path), 1):
        line = _parsed(raw)
        if line.get("event") == "start":
            if line.get("version") != _VERSION:
                raise DataError(
                    f"{path} has another format",
                    expected=f"version {_VERSION}",
                    found=str(line.get("version")),
                    next_step="read it with the version of hvdtrain that trained",
                )
            if _is_start(line):
                heads.append((line, [], []))
            else:
                damaged = f"line {number} of steps.jsonl, which begins a start, is damaged: that start is left out"
                heads.append((_unknown(line), [], [damaged]))
        elif not heads or not heads[-1][0]["size"]:
            continue
        elif line.get("event") == "block" and _is_whole(line, heads[-1][0]):
            heads[-1][1].append(line)
        else:
            heads[-1][2].append(f"line {number} of steps.jsonl is damaged and left out")
    for head, blocks, dropped in heads:
        found.append(_start(head, blocks, dropped))
    return found


def _lines(path: Path) -> list[bytes]:
    for file in (path, TimelineLayout(path).steps, RunLayout(path).timeline.steps):
        if file.is_file():
            return [line for line in file.read_bytes().splitlines() if line.strip()]
    return []


def _parsed(raw: bytes) -> dict[str, Any]:
    try:
        line = orjson.loads(raw)
    except ValueError:
        return {}
    return line if isinstance(line, dict) else {}


def _is_start(line: Mapping[str, Any]) -> bool:
    """Whether a start has what is read of it, of as many ranks as it says."""
    try:
        names, link = [line["hosts"], line["clock_ids"]], line.get("link", [])
        clocks = [line["clock"][name] for name in ("offset_us", "error_us")] if "clock" in line else []
        return (
            all(isinstance(line[name], int) for name in ("size", "start", "at_step"))
            and isinstance(line["origin_us"], (int, float))
            and line["size"] > 0
            and all(isinstance(each, list) and len(each) == line["size"] for each in (*names, *clocks))
            and all(isinstance(name, str) for each in names for name in each)
            and _floats(clocks).ndim <= 2
            and all(len(pair) == 2 for pair in link)
            and bool(np.isfinite(_floats(link)).all())
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return False


def _unknown(line: Mapping[str, Any]) -> dict[str, Any]:
    """In the place of a start that is damaged: one of no ranks."""
    number = line.get("start")
    known = {"start": number if isinstance(number, int) else -1, "at_step": 0, "origin_us": 0.0}
    return {**known, "size": 0, "hosts": [], "clock_ids": []}


def _is_whole(line: Mapping[str, Any], head: Mapping[str, Any]) -> bool:
    """Whether a block has what is read of it, in the right shape."""
    try:
        steps = len(line["start_us"][0])
        shape = (head["size"], steps)
        tables = [*(line[name] for name in _MOMENTS), *line["parts_us"].values()]
        clocks = [line["clock"]["offset_us"], line["clock"]["error_us"], *line["facts"].values()]
        return (
            isinstance(line["first_step"], int)
            and steps > 0
            and all(_floats(table).shape == shape for table in tables)
            and all(len(values) == head["size"] for values in clocks)
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        return False


def _floats(values: Any) -> Floats:
    return np.array(values, dtype=np.float64)


def _start(head: Mapping[str, Any], blocks: Sequence[Mapping[str, Any]], dropped: Sequence[str]) -> Start:
    size, origin_us = int(head["size"]), float(head["origin_us"])
    counts = [len(block["start_us"][0]) for block in blocks]

    def joined(tables: Sequence[Any], shift_us: float = 0.0) -> Floats:
        empty = np.empty((size, 0))
        return np.concatenate([empty, *map(_floats, tables)], axis=1) + shift_us

    step = np.concatenate([np.empty(0), *(b["first_step"] + np.arange(n) for b, n in zip(blocks, counts, strict=True))])
    number = np.repeat(np.arange(len(blocks)), counts)
    moments = {name: joined([block[name] for block in blocks], origin_us) for name in _MOMENTS}
    parts = {
        name: joined([b["parts_us"].get(name, np.zeros((size, n))) for b, n in zip(blocks, counts, strict=True)])
        for name in (*PARTS, "gc")
    }
    known = np.isfinite([*moments.values()]).all(axis=(0, 1))  # a step that a rank does not know is no use
    steps = StepTable(
        hosts=head["hosts"],
        step=step[known].astype(np.int32),
        block=number[known].astype(np.int32),
        **{name: values[:, known] for name, values in moments.items()},
        parts_us={name: values[:, known] for name, values in parts.items()},
        facts=[block["facts"] for block in blocks],
        clock_error_us=_worst([block["clock"]["error_us"] for block in blocks], size),
    )
    clocks = [head.get("clock", {"offset_us": [0.0] * size, "error_us": [0.0] * size}), *(b["clock"] for b in blocks)]
    return Start(
        number=int(head["start"]),
        at_step=int(head["at_step"]),
        origin_us=origin_us,
        clock_ids=head["clock_ids"],
        link=[(int(nbytes), float(seconds)) for nbytes, seconds in head.get("link", [])],
        steps=steps,
        clock_us=_floats([origin_us, *(origin_us + float(b["end_us"][0][-1] or 0.0) for b in blocks)]),
        offset_us=_floats([clock["offset_us"] for clock in clocks]),
        error_us=_floats([clock["error_us"] for clock in clocks]),
        dropped=list(dropped),
    )


def _worst(errors_us: Sequence[Any], size: int) -> Floats:
    """Of each rank [size]; infinite where it is not known."""
    table = np.concatenate([np.zeros((1, size)), *(_floats([errors]) for errors in errors_us)])
    worst: Floats = np.where(np.isnan(table), np.inf, table).max(axis=0)
    return worst
