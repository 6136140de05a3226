"""Ledgers of runs that never ran: starts that begin at any step before the last, on any number of ranks."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from hvdtrain.data.loader import Stream
from hvdtrain.data.sample_order import SampleOrder
from hvdtrain.run_layout import RunLayout
from hvdtrain.state.ledger import Ledger, StartHeader, ledger_file_name


@dataclass(frozen=True)
class Stretch:
    """A start, and what became of it.

    Attributes:
        back: steps before the last one that it goes on from.
        size: number of ranks.
        steps: that all ranks tell of.
        ahead: ranks that tell of one step more; all but one at most.
        torn: of the last line of rank 0, bytes that are lost.
        global_batch: samples a step.
        goes_past: it is a roll back: its first step leaves out the positions that it had before.
    """

    back: int = 0
    size: int = 1
    steps: int = 3
    ahead: int = 0
    torn: int = 0
    global_batch: int = 4
    goes_past: bool = False


@dataclass
class Written:
    """What was written.

    Attributes:
        run: its folder.
        counted: by step, the start whose lines count.
        taken: positions that count, in order.
        positions: by step, the position behind it.
    """

    run: Path
    counted: dict[int, int] = field(default_factory=dict)
    taken: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=lambda: [0])


def write_ledger(
    run: Path, stretches: Sequence[Stretch], *, length: int, sources: Sequence[Sequence[int]] = ()
) -> Written:
    """Write the ledger of these starts, a journal, and a checkpoint of the last step that all ranks tell of."""
    done = Written(run)
    left_out: list[list[int]] = []
    run.mkdir(parents=True, exist_ok=True)
    journal: list[dict[str, object]] = []
    by_step: dict[int, list[int]] = {}
    for number, stretch in enumerate(stretches):
        first = max(0, len(done.positions) - 1 - stretch.back)
        position = done.positions[first]
        del done.positions[first + 1 :]
        if stretch.goes_past:
            kept = [hole for hole in left_out if hole[1] <= position]
            left_out = [*kept, [position, position + stretch.global_batch]]
            journal.append({"event": "rolled_back", "positions": left_out[-1]})
        else:
            journal.append({"event": "started"})
        head = StartHeader(
            number, "started", first, position, stretch.size, 0, "here", 3, stretch.global_batch, 2,
            length, "data", left_out, [list(source) for source in sources],
        )  # fmt: skip
        for rank in range(stretch.size):
            _write_rank(run, replace(head, rank=rank), stretch)
        stream = Stream([], 3, stretch.global_batch, 2, 0, 1, left_out)
        for step in range(first + 1, first + stretch.steps + 1):
            by_step[step] = [p for part in stream.step(position) for p in range(part.start, part.stop)]
            position = stream.position_after(position)
            done.positions.append(position)
            done.counted[step] = number
    last = len(done.positions) - 1
    done.taken = [p for step in range(1, last + 1) for p in by_step[step]]
    done.counted = {step: number for step, number in done.counted.items() if step <= last}
    (run / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in journal))
    (run / "checkpoints" / f"step-{last:06d}").mkdir(parents=True)
    return done


def _write_rank(run: Path, head: StartHeader, stretch: Stretch) -> None:
    is_ahead = head.rank < min(stretch.ahead, stretch.size - 1)
    ledger = Ledger(RunLayout(run).ledger, print)
    ledger.begin_start(head)
    stream = Stream([], head.seed, head.global_batch, head.micro_batch, head.rank, head.size, head.left_out)
    position = head.position
    for step in range(head.from_step + 1, head.from_step + stretch.steps + is_ahead + 1):
        for part in stream.step(position):
            order = SampleOrder(head.samples, head.sources, head.seed)
            indices = order.indices(np.arange(part.start, part.stop))
            ledger.add_samples(part.start, part.stop, array("q", indices.tolist()).tobytes())
        ledger.write(step)
        position = stream.position_after(position)
    ledger.close()
    if is_ahead and stretch.torn:
        path = RunLayout(run).ledger / ledger_file_name(head.start, head.rank)
        path.write_bytes(path.read_bytes()[: -stretch.torn])
