"""Steps of several ranks as a simulated job makes them: all wait for the last one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.timeline.columns import RankSpans, RunTrace, StepTable
from hvdtrain.timeline.steps import on_one_clock, read_span_files, read_starts

Floats = NDArray[np.float64]

SHARES = {"data": 0.05, "copy": 0.0, "forward": 0.3, "backward": 0.55, "clip": 0.02, "optimizer": 0.08}
_BEFORE = ("data", "copy", "gather", "activations", "forward", "backward")
"""Parts before a rank is ready."""
_NO_WAIT_US = 5.0


def table_of(
    work_ms: Floats,
    *,
    exchange_ms: float = 1.0,
    skew_ms: Floats | None = None,
    more_ms: Mapping[str, Floats] | None = None,
    every: int = 1,
    block: int = 50,
    error_us: float = 0.0,
    facts: Mapping[str, list[float | None]] | None = None,
) -> StepTable:
    """Run `work_ms` [ranks, steps] step by step.

    Args:
        exchange_ms: between the last rank's being ready and the sums.
        skew_ms: by how much later each rank has the sums [ranks].
        more_ms: work by part beside `work_ms` [ranks, steps].
        every: steps after which ranks exchange; between, as after the optimizer then, a rank waits for none.
    """
    ranks, steps = work_ms.shape
    more = dict(more_ms or {})
    parts = {name: share * work_ms * 1e3 + 1e3 * more.get(name, 0.0) for name, share in SHARES.items()}
    parts |= {name: 1e3 * more.get(name, np.zeros_like(work_ms)) for name in ("gather", "activations", "aside", "gc")}
    start, ready, released, end = (np.zeros((ranks, steps)) for _ in range(4))
    now = np.full(ranks, 5e9)
    for step in range(steps):
        now = now + parts["aside"][:, step]
        if parts["aside"][:, step].any():
            now[:] = now.max()
        start[:, step] = now
        after = parts["clip"][:, step] + parts["optimizer"][:, step]
        ready[:, step] = now + sum(parts[name][:, step] for name in _BEFORE) + (after if every > 1 else 0.0)
        released[:, step] = ready[:, step].max() + 1e3 * exchange_ms
        if (step + 1) % every:
            released[:, step] = ready[:, step] + _NO_WAIT_US
        elif skew_ms is not None:
            released[:, step] += 1e3 * skew_ms
        end[:, step] = released[:, step] + (after if every == 1 else 0.0)
        now = end[:, step].copy()
    blocks = np.arange(steps) // block
    return StepTable(
        hosts=[f"host{rank // 8}" for rank in range(ranks)],
        step=np.arange(1, steps + 1, dtype=np.int32),
        block=blocks.astype(np.int32),
        start_us=start,
        ready_us=ready,
        released_us=released,
        end_us=end,
        parts_us={**parts, "wait": released - ready},
        facts=[dict(facts or {}) for _ in range(int(blocks.max()) + 1)],
        clock_error_us=np.where(np.arange(ranks) > 0, error_us, 0.0),
    )


def columns_of(table: StepTable, steps: NDArray[Any]) -> StepTable:
    """Return what is left of a table of which only some steps are stamped: their columns, or a mask of them."""
    moments = {name: getattr(table, name)[:, steps] for name in ("start_us", "ready_us", "released_us", "end_us")}
    parts = {name: values[:, steps] for name, values in table.parts_us.items()}
    return replace(table, step=table.step[steps], block=table.block[steps], parts_us=parts, **moments)


def read_steps(path: Path) -> list[StepTable]:
    """Return the tables of a run's starts, without those that have no steps."""
    return [start.steps for start in read_starts(path) if len(start.steps.step)]


def read_spans(path: Path) -> list[RankSpans]:
    """Return the spans of a run's last start as its report has them, a rank each, on rank 0's clock."""
    return on_one_clock(read_span_files(path), read_starts(path))


def run_of(table: StepTable, **more: object) -> RunTrace:
    return RunTrace(Path("runs/example"), len(table.hosts), steps=table, **more)  # type: ignore[arg-type]


def noise(generator: np.random.Generator, shape: tuple[int, int], kind: str, scale: float) -> Floats:
    """About 0, of standard deviation `scale`: gaussian, heavy (Student's t, 3 degrees), lasting (r = 0.5 a step)."""
    if kind == "heavy":
        return scale * generator.standard_t(3, shape) / np.sqrt(3)
    found = generator.normal(0, scale, shape)
    if kind == "lasting":
        for step in range(1, shape[1]):
            found[:, step] = 0.5 * found[:, step - 1] + np.sqrt(0.75) * found[:, step]
    return found
