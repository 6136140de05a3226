"""Laws 1 and 2 for every optimizer, schedule, precision and mode of checkpointing, in pairs; ranks are threads.

The values are those of the package's tables and options: a new one takes part by itself.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from hvdtrain import Task
from hvdtrain.config.schema import Config, MemoryConfig
from hvdtrain.training.start.optimizers import OPTIMIZERS, SCHEDULES
from tests.laws.test_laws import check_same, record
from tests.support.gallery import Recorded
from tests.support.stack import STACK, stack

AXES: dict[str, tuple[str, ...]] = {
    "optimizer.name": tuple(OPTIMIZERS),
    "optimizer.schedule": tuple(SCHEDULES),
    "precision": get_args(get_type_hints(Config)["precision"]),
    "memory.checkpointing": get_args(get_type_hints(MemoryConfig)["checkpointing"]),
}
Row = tuple[str, ...]
"""A value of each of `AXES`."""

ROUNDING = {"fp32": 1e-5}
"""Relative difference of losses between numbers of ranks, which sum gradients in another order."""
COARSE = 2e-3
"""The same in other precisions: a weight that differs in its last bit may be rounded to another one."""


def _pairs(row: Row) -> set[tuple[tuple[int, str], ...]]:
    return set(combinations(enumerate(row), 2))


def _diagonal() -> list[Row]:
    """Rows that have each value."""
    values = AXES.values()
    return [tuple(axis[number % len(axis)] for axis in values) for number in range(max(map(len, values)))]


def _rest() -> list[Row]:
    """Rows that have, with those of `_diagonal`, each pair of values. Each is the one with most pairs that lack."""
    rows = list(product(*AXES.values()))
    lacking = set[Any]().union(*map(_pairs, rows)).difference(*map(_pairs, _diagonal()))
    found = []
    while lacking:
        found.append(best := max(rows, key=lambda row: len(_pairs(row) & lacking)))
        lacking -= _pairs(best)
    return found


def _build(rank: int) -> Task:
    """Blocks with dropout, tied and frozen parameters; the optimizer is that of the options."""
    return replace(stack(), optimizer=None)


def _train(folder: Path, row: Row, *options: str, size: int) -> Recorded:
    chosen = (f"--{name}={value}" for name, value in zip(AXES, row, strict=True))
    return record(folder, *STACK[1:], *chosen, *options, size=size, build=_build)


@pytest.mark.parametrize(
    "row",
    [*_diagonal(), *(pytest.param(row, marks=pytest.mark.slow) for row in _rest())],
    ids="-".join,
)
def test_laws_1_and_2(row: Row, tmp_path: Path) -> None:
    """One and two ranks have one curve; two that were stopped and resumed have the bits of two that were not."""
    options = ("--optimizer.warmup_steps=2", "--train.steps=7")
    one, two = (_train(tmp_path / str(size), row, *options, size=size) for size in (1, 2))
    tolerance = ROUNDING.get(row[list(AXES).index("precision")], COARSE)
    assert len(one.losses()) == 7 and two.losses() == pytest.approx(one.losses(), rel=tolerance)
    for stop in (4, 7):
        parts = _train(tmp_path / "parts", row, *options, f"--train.stop_at={stop}", size=2)
    assert parts.losses() == two.losses() and two.state().values["progress"]["skipped"] == 0
    check_same(parts.state(), two.state())
