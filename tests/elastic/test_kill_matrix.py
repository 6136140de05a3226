"""Each fault at least once, at a few of the places at which `benchmarks/chaos.py` injects all of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.chaos import DIVIDED, LATE, Cell, run_cell
from tests.support.chaos_rank import COPIES
from tests.support.host import required

pytestmark = pytest.mark.slow

CELLS = [
    Cell("SIGKILL", "exchange", rank=0),
    Cell("SIGSTOP", "data"),
    Cell("disk full", "checkpoint"),
    Cell("SIGTERM", "forward", rank=0),
    Cell("SIGKILL", "start-up"),
    Cell("SIGKILL", "step", size=3, rank=0),
    Cell("SIGKILL", "commit"),
    Cell("disk full", "evaluation", step=LATE),
    Cell("link cut", "backward", hosts=2),
    Cell("SIGKILL", COPIES, size=3, options=DIVIDED),
]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.fault} {cell.phase} {cell.size}")
def test_nothing_is_lost(cell: Cell, tmp_path: Path, matrix_losses: dict[int, float]) -> None:
    if (cell.hosts == 2 or cell.fault == "disk full") and os.geteuid() != 0 and "CI" not in os.environ:
        pytest.skip("needs root")
    with required():
        outcome = run_cell(cell, tmp_path, matrix_losses)
    assert not outcome.faults, outcome.said
