"""What a job of many ranks costs its driver: counted in calls, which no machine makes faster or slower."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from hvdtrain.launch.commands import Limits
from tests.support.job_world import World


def calls(act: Callable[[], object]) -> int:
    """How many functions of Python are called in it."""
    count = 0

    def see(_frame: FrameType, what: str, _of: Any) -> None:
        nonlocal count
        count += what == "call"

    sys.setprofile(see)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


def job(size: int) -> World:
    made = World(Limits(size, size // 2, size), {"a": 8, **{f"b{i}": 8 for i in range(size // 8 - 1)}})
    assert len(made.round()) == size
    return made


DEEDS: dict[str, Callable[[World], object]] = {
    "a moment goes by": lambda world: world.members.tick(world.now_s),
    "a rank is gone": lambda world: world.members.worker_exited(world.by_rank(9).number, -9, world.now_s),
    "a host is gone": lambda world: world.members.agent_lost("b1", "why", world.now_s),
    "one leaves the round": lambda world: world.members.worker_message(
        world.by_rank(9).number, {"type": "join", "why": "changed"}, world.now_s
    ),
}


@pytest.mark.parametrize("deed", DEEDS)
def test_the_cost_of_events_grows_in_proportion(deed: str) -> None:
    few, many = job(32), job(128)
    assert calls(lambda: DEEDS[deed](many)) < 6 * calls(lambda: DEEDS[deed](few))


def test_a_sign_of_life_costs_the_same_among_any_number() -> None:
    costs = []
    for world in (job(32), job(128)):
        message = {"type": "alive", "round": 1, "step": 1, "idle_s": 0.1, "waiting": True}
        number, members, now_s = world.by_rank(9).number, world.members, world.now_s
        costs.append(calls(lambda: members.worker_message(number, message, now_s)))  # noqa: B023
    assert costs[0] == costs[1]
