"""Reader of ``steps.jsonl``: the step stamps of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from hvdtrain.observe.step_format import VERSION, BlockLine, ClockLine, Numbers, StartLine, as_array
from hvdtrain.run_layout import RunLayout, TimelineLayout
from hvdtrain.spans import PARTS
from hvdtrain.timeline.columns import Floats, StepTable


@dataclass(frozen=True)
class Start:
    """One start of a run.

    Attributes:
        number: from 0; -1 if unknown.
        at_step: the step from which it resumed.
        link: allreduces measured at the start: pairs of bytes and seconds.
        steps: empty if the start ended before the first block.
        clock_us: times of the offsets, by rank 0's clock [k].
        offset_us: rank 0's clock minus the rank's clock, NaN if unknown [k, ranks].
        error_us: bound of the offset's error [k, ranks].
        dropped: sentences about lines that could not be used.
    """

    number: int
    at_step: int
    link: Sequence[tuple[int, float]]
    steps: StepTable
    clock_us: Floats
    offset_us: Floats
    error_us: Floats
    dropped: Sequence[str]


def read_starts(path: Path) -> list[Start]:
    """Read all starts of a run. Damaged lines, and starts of another version, are skipped and listed in `dropped`.

    Args:
        path: of the file, of its folder, or of the run. Without a file the list is empty.
    """
    heads: list[tuple[StartLine | None, int, list[BlockLine], list[str]]] = []
    for number, raw in enumerate(_lines(path), 1):
        line = _decode(raw)
        head = heads[-1][0] if heads else None
        if isinstance(line, (StartLine, _DamagedStart)):
            if isinstance(line, StartLine) and line.version == VERSION and line.fits():
                heads.append((line, line.start, [], []))
                continue
            text = f"line {number} of steps.jsonl, the first of a start, is damaged: the start is ignored"
            if line.version != VERSION:
                text = f"a start in steps.jsonl has format {line.version}, this program reads {VERSION}: it is ignored"
            heads.append((None, line.start if isinstance(line.start, int) else -1, [], [text]))
        elif head is not None and isinstance(line, BlockLine) and line.fits(head.size):
            heads[-1][2].append(line)
        elif head is not None:
            heads[-1][3].append(f"line {number} of steps.jsonl is damaged and ignored")
    no_ranks = StartLine(VERSION, -1, 0, 0, [], [], 0.0)
    return [_start(head or no_ranks, number, blocks, dropped) for head, number, blocks, dropped in heads]


def _lines(path: Path) -> list[bytes]:
    for file in (path, TimelineLayout(path).steps, RunLayout(path).timeline.steps):
        if file.is_file():
            return [line for line in file.read_bytes().splitlines() if line.strip()]
    return []


_DEVICE_US = 100.0
"""By how much a device may disagree with its host's clock: see `training.records.device_spans.SLACK_NS`."""


class _DamagedStart(msgspec.Struct):
    """The readable fields of a damaged start."""

    event: Literal["start"]
    version: Any = None
    start: Any = -1


_LINE = msgspec.json.Decoder(StartLine | BlockLine)
_DAMAGED_START = msgspec.json.Decoder(_DamagedStart)


def _decode(raw: bytes) -> StartLine | BlockLine | _DamagedStart | None:
    for decoder in (_LINE, _DAMAGED_START):
        with suppress(msgspec.DecodeError, ValueError, RecursionError):
            line: StartLine | BlockLine | _DamagedStart = decoder.decode(raw)
            return line
    return None


def _start(head: StartLine, number: int, blocks: Sequence[BlockLine], dropped: Sequence[str]) -> Start:
    def joined(tables: Sequence[Any], shift_us: float = 0.0) -> Floats:
        return np.concatenate([np.empty((head.size, 0)), *map(as_array, tables)], axis=1) + shift_us

    step = np.concatenate([np.empty(0), *(block.first_step + np.arange(block.steps) for block in blocks)])
    block_number = np.repeat(np.arange(len(blocks)), [block.steps for block in blocks])
    start, ready, released, end = (joined([block.moments[k] for block in blocks], head.origin_us) for k in range(4))
    parts = {
        name: joined([block.parts_us.get(name, np.zeros((head.size, block.steps))) for block in blocks])
        for name in (*PARTS, "gc")
    }
    known = np.isfinite([start, ready, released, end]).all(axis=(0, 1))  # a step is useless if a rank lacks it
    devices = head.devices or [""] * head.size
    of_device = np.array([_DEVICE_US if device else 0.0 for device in devices])
    errors = np.concatenate([np.zeros((1, head.size)), *(as_array([block.clock.error_us]) for block in blocks)])
    steps = StepTable(
        hosts=head.hosts,
        devices=devices,
        step=step[known].astype(np.int32),
        block=block_number[known].astype(np.int32),
        start_us=start[:, known],
        ready_us=ready[:, known],
        released_us=released[:, known],
        end_us=end[:, known],
        parts_us={name: values[:, known] for name, values in parts.items()},
        facts=[block.facts for block in blocks],
        clock_error_us=np.where(np.isnan(errors), np.inf, errors).max(axis=0) + of_device,
        elements=joined([block.elements or np.zeros((head.size, block.steps)) for block in blocks])[:, known],
        stages=head.consecutive_stages,
    )
    zeros: Numbers = [0.0] * head.size
    clocks = [head.clock or ClockLine(zeros, zeros), *(block.clock for block in blocks)]
    return Start(
        number=number,
        at_step=head.at_step,
        link=head.link,
        steps=steps,
        clock_us=as_array([head.origin_us, *(head.origin_us + (block.end_us[0][-1] or 0.0) for block in blocks)]),
        offset_us=as_array([clock.offset_us for clock in clocks]),
        error_us=as_array([clock.error_us for clock in clocks]),
        dropped=list(dropped),
    )
