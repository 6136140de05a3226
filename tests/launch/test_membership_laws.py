"""The laws of `hvdtrain.launch.membership` over any history of faults, growth, removal and time; and what it costs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.launch import driver as driver_module
from hvdtrain.launch.job import Limits
from hvdtrain.launch.spec import JobSpec
from hvdtrain.launch.worker_plan import WorkerPlan
from tests.support.job_world import FakeWorker, World

LIMITS = Limits(start=3, least=2, most=5)
QUIET_S = 200.0


Action = Callable[[World, int], object]


def _of_one(act: Callable[[World, FakeWorker], object]) -> Action:
    """Something that one of the living does, or that is done to it."""

    def do(job: World, number: int) -> None:
        if living := job.living():
            act(job, living[number % len(living)])

    return do


def _drain(job: World, worker: FakeWorker) -> None:
    if not worker.dying:
        job.say(worker, "drain")


def _fail(job: World, worker: FakeWorker) -> None:
    if worker.inside:
        job.join(worker, "failed", "an error")


def _deaf(job: World, worker: FakeWorker) -> None:
    """A message crosses another: it is heard late."""
    worker.deaf = not worker.deaf
    if not worker.deaf and worker.inside and worker.told[-1] in ("broken", "changed"):
        job.join(worker, "failed")


def _step(job: World, number: int) -> None:
    for worker in job.round():
        worker.step += 1


def _hosts(job: World, number: int) -> None:
    hosts = dict(zip("abc", (number % 3, number // 3 % 3, number // 9 % 3), strict=True))
    job.hosts({name: slots for name, slots in hosts.items() if slots})


def _cut(job: World, number: int) -> None:
    if job.agents:
        job.cut(sorted(job.agents)[number % len(job.agents)])


def _reach(job: World, number: int) -> None:
    job.unreachable = {"b"} if number % 2 else set()


def _wait(job: World, number: int) -> None:
    job.wait(number % 7 + 0.3)


def _late(job: World, number: int) -> None:
    """Newcomers take their time from now on, or no longer."""
    job.joining = not job.joining
    for worker in job.living():
        if job.joining and not worker.round and not worker.dying:
            job.join(worker)


OF_ONE = (World.exit, World.exit, World.die, _drain, _fail, _deaf)
ACTIONS: list[Action] = [*map(_of_one, OF_ONE), _step, _hosts, _cut, _reach, _wait, _wait, _late]
History = list[tuple[Action, int]]
HISTORIES = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 26)), max_size=25)


def _live(job: World, history: History) -> None:
    for action, number in history:
        if job.code is None:
            action(job, number)
            _check(job)


def _check(job: World) -> None:
    """What holds at every moment."""
    limits = job.members.job.limits
    restarts = sum(event.name == "restart" for event in job.events)
    fresh = 0
    for before, after in zip([[], *job.rounds], job.rounds, strict=False):
        assert limits.least <= len(after) <= limits.most, job.rounds
        assert len(set(after)) == len(after)
        fresh += after[0] not in before
    assert fresh <= 1 + restarts, "a round was led by one that holds no state"
    inside = job.round()
    assert [w.rank for w in inside] == sorted({w.rank for w in inside})
    newest = [(w.host, w.place["local_rank"]) for w in inside if w.round == len(job.rounds)]
    assert len(set(newest)) == len(newest)


def _heal(job: World) -> None:
    """Everything works again, and time goes by."""
    job.unreachable = set()
    if not job.joining:
        _late(job, 0)
    for worker in job.living():
        worker.deaf = False
        if worker.dying:
            job.exit(worker)
        elif worker.inside and worker.told[-1] in ("broken", "changed"):
            job.join(worker, "failed")
        elif worker.told and worker.told[-1] == "end":
            job.exit(worker, 0)
    if job.code is None:
        job.hosts({"a": 3, "b": 2})
    job.wait(QUIET_S)


@pytest.mark.slow
@given(HISTORIES, st.integers(0, 3))
def test_no_wait_has_no_end(history: History, restarts: int) -> None:
    job = World(replace(LIMITS, restarts=restarts), {"a": 2, "b": 2})
    _live(job, history)
    _heal(job)
    _check(job)
    if job.code is None:
        assert len(job.round()) == LIMITS.most, "all places are filled again"
        assert {w.size for w in job.round()} == {LIMITS.most} and len(job.living()) == LIMITS.most
        for worker in job.round():
            job.finish(worker)
        assert job.code == 0
    else:
        assert any(event.name == "failed" and event.facts["why"] for event in job.events)
    assert not job.living() and not job.round()


@given(HISTORIES, st.sampled_from(["SIGTERM", "SIGINT"]), st.booleans())
def test_a_signal_always_ends_the_job(history: History, name: str, deaf: bool) -> None:
    job = World(replace(LIMITS, restarts=2), {"a": 2, "b": 2})
    _live(job, history)
    if job.code is not None:
        return
    for worker in job.living():
        worker.deaf = worker.deaf or deaf
    job.members.signal_received(name, job.now_s)
    job.tick(0)
    job.wait(LIMITS.stop_s + LIMITS.end_s + 1)
    assert job.code is not None and job.code > 0 and not job.living()


@given(HISTORIES)
def test_it_ends_some_day_where_too_few_ever_come_back(history: History) -> None:
    job = World(replace(LIMITS, elastic_timeout_s=30, start_timeout_s=40), {"a": 2, "b": 2})
    _live(job, history)
    if job.code is None:
        job.hosts({"a": 1})
        job.unreachable.add("b")
        for worker in job.living("b"):
            job.exit(worker, -9)
    for _ in range(4):
        job.wait(60)
    assert job.code == 1 and not job.living()


def calls(act: Callable[[], object]) -> int:
    """How many functions of Python are called in it: what no machine makes faster or slower."""
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
    "a moment goes by": lambda world: None,
    "a rank is gone": lambda world: world.members.worker_exited(world.by_rank(9).number, -9, world.now_s),
    "a host is gone": lambda world: world.members.agent_lost("b1", "why", world.now_s),
    "one leaves the round": lambda world: world.members.worker_message(
        world.by_rank(9).number, {"type": "join", "why": "changed"}, world.now_s
    ),
}


@pytest.mark.parametrize("deed", DEEDS)
def test_the_cost_of_events_grows_in_proportion(deed: str) -> None:
    def cost(world: World) -> int:
        return calls(lambda: (DEEDS[deed](world), world.members.tick(world.now_s)))

    assert cost(job(128)) < 6 * cost(job(32))


def test_a_driver_that_lags_behind_judges_by_what_it_has_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handling takes longer than messages take to arrive: until then, whoever spoke last is not silent."""
    clock = SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr(driver_module, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    job, handled = JobSpec(arguments=("x",), ranks=2), list[float]()
    driver = driver_module.Driver(WorkerPlan(job, ("x",), Limits(2, 2, 2), {"a": 2}), lambda text, err: None)

    def handle(arrived_s: float) -> None:
        handled.append(arrived_s)
        clock.now_s += 20.0

    for seconds in (0.0, 0.5, 1.0):
        clock.now_s = 1000.0 + seconds
        driver._put(partial(handle, clock.now_s))
    assert [driver._handle_all() for _ in range(3)] == [1000.0, 1000.5, 1001.0] == handled
    assert driver._handle_all() == clock.now_s, "nothing is left: silence counts until now"
