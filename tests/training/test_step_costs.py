"""What a step costs over a loop by hand: counts, which hold on any machine. `benchmarks/overhead.py` prints causes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdtrain import Task
from tests.support.divided_models import divided
from tests.support.step_costs import STEPS, TINY, Calls, Operations, more_than_by_hand, task

PASSES = 2


def dense() -> Task:
    return task(*TINY)


def experts() -> Task:
    """Three layers with routers."""
    return divided(layers=4)


def _costs(
    make: Callable[[], Calls | Operations], model: Callable[[], Task], folder: Path, passes: int
) -> Counter[str]:
    found: Counter[str] = Counter()
    steps = STEPS if model is dense else STEPS // 8
    for (kind, _), count in more_than_by_hand(make, model(), model(), folder, passes, steps).items():
        found[kind] += count
    return found


@pytest.mark.parametrize(
    ("make", "model", "a_step", "a_pass"),
    [
        (Operations, dense, {"operations": 3}, {"operations": 0}),
        (Operations, experts, {"operations": 20}, {"operations": 6}),
        (Calls, dense, {"python_calls": 5, "c_calls": 10}, {"python_calls": 62, "c_calls": 54}),
    ],
)
def test_a_step_does_little_more_than_a_loop_by_hand(
    make: Callable[[], Calls | Operations],
    model: Callable[[], Task],
    a_step: dict[str, float],
    a_pass: dict[str, float],
    tmp_path: Path,
) -> None:
    """In a step of one micro-batch, and in each further one."""
    one, more = _costs(make, model, tmp_path / "one", 1), _costs(make, model, tmp_path / "more", PASSES)
    assert all(one[kind] <= most for kind, most in a_step.items()), one
    further = {kind: (more[kind] - one[kind]) / (PASSES - 1) for kind in a_pass}
    assert all(further[kind] <= most for kind, most in a_pass.items()), further
