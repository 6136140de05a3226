"""The steps of a Timeline: how many, which tensors belong to them, and where they are steady."""

from __future__ import annotations

import numpy as np

from hvdtrain.timeline.analysis.phases import count_steps, recurring, without_start
from hvdtrain.timeline.columns import HorovodTrace
from tests.support.timelines import Turn, trace_of

STEP_US, STEPS = 1000.0, 10
ONCE = "evaluation"


def _trace(steps: int = STEPS, once_at: float = 8.5) -> HorovodTrace:
    """Two tensors a step, a broadcast before them, and a tensor that comes once."""
    phases = {"MPI_ALLREDUCE": 100.0}
    turns = [Turn("model", 0.0, {"MPI_BCAST": 400.0}, operation="BROADCAST")]
    for step in range(1, steps + 1):
        turns += [Turn(name, step * STEP_US + at, phases) for name, at in (("a", 0.0), ("b", 500.0))]
    return trace_of([*turns, Turn(ONCE, once_at * STEP_US + 700.0, phases)])


def test_steps_are_the_turns_of_most_tensors_and_what_comes_once_is_none() -> None:
    trace = _trace()
    assert count_steps(trace) == STEPS and count_steps(_trace(1)) == 0 and count_steps(trace_of([])) == 0
    assert [name for name, again in zip(trace.tensors, recurring(trace), strict=True) if again] == ["a", "b"]


def test_it_is_steady_from_the_end_of_its_first_step_on() -> None:
    """However late a tensor that comes once may be."""
    found = without_start(_trace())
    assert found.start_us.min() == 2 * STEP_US
    assert count_steps(found) == STEPS - 1
    assert ONCE in {found.tensors[number] for number in found.tensor}


def test_of_few_steps_none_is_left_out() -> None:
    trace = _trace(3, once_at=2.5)
    np.testing.assert_array_equal(without_start(trace).start_us, trace.start_us)
