"""A replayed step: by hand, by an oracle of ticks, and what must hold of any."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.timeline.whatif.replay import replay
from hvdtrain.timeline.whatif.step import Arrival, Collective, Exchange, Part, Step
from tests.support.whatif_oracle import oracle


def _plain(wire_s: float, cpu_s: float = 0.0) -> Exchange:
    return Exchange([Collective(0, wire_s, cpu_s)])


def test_without_exchange_a_step_is_its_parts() -> None:
    found = replay(Step(3, [Arrival(1, 0, 0), Arrival(2, 0, 0)], 1, [Exchange([])], after_s=4))
    assert (found.step_s, found.backward_s, found.wait_s, found.wire_s) == (11, 4, 0, 0)


def test_what_backward_hides_costs_nothing_until_there_is_more_of_it() -> None:
    """Two buckets, full 2 and 6 after backward began, which lasts 10."""

    def step(wire_s: float) -> Step:
        arrivals = [Arrival(2, 0, 0), Arrival(4, 0, 1)]
        return Step(0, arrivals, 4, [_plain(wire_s), _plain(wire_s)])

    assert [replay(step(wire_s)).step_s for wire_s in (0, 1, 4)] == [10, 10, 10]
    assert replay(step(5)).step_s == 12, "the second begins at 7"
    assert replay(step(5)).wait_s == 2
    assert replay(step(9)).step_s == 20, "2 + 9 + 9"


def test_what_backward_leaves_out_is_packed_and_sent_after_it() -> None:
    step = Step(0, [Arrival(5, 0, 0)], 0, [_plain(1), _plain(3)], late_s=[0, 2])
    assert replay(step).step_s == 10
    assert replay(step).wait_s == 5


def test_a_gather_hides_behind_the_work_before_its_need_if_it_starts_in_advance() -> None:
    """It takes 3 and is needed 1 after the step began."""
    step = Step(0, [], 0, [], forward=[Part(0, 1), Part(1, 2)], gathers=[Exchange([Collective(0, 3)])])
    assert (replay(step).step_s, replay(step).gather_s) == (6, 3)
    ahead = replay(replace(step, ahead_bytes=0))
    assert (ahead.step_s, ahead.gather_s) == (5, 2)


@pytest.mark.parametrize(("limit", "kept", "backward_s"), [(3, 0, 3), (2, 0, 6), (1, 0, 11), (2, 1, 11)])
def test_packing_waits_for_older_buckets_and_sums_beyond_the_limit(limit: int, kept: int, backward_s: int) -> None:
    arrivals = [Arrival(1, 0, bucket) for bucket in range(3)]
    found = replay(Step(0, arrivals, 0, [replace(_plain(5), nbytes=1, kept_bytes=kept)] * 3, limit_bytes=limit))
    assert (found.backward_s, found.step_s) == (backward_s, 16)


def test_sums_of_a_pass_hide_behind_the_next_forward_pass() -> None:
    first = Step(0, [Arrival(1, 0, 0)], 0, [_plain(5)])
    assert replay(replace(first, before_s=3, earlier=[first])).step_s == 1 + 5 + 1 + 5, "3 of the first 5 are hidden"


WHOLE = st.integers(0, 6).map(float)


@st.composite
def passes(draw: st.DrawFn) -> Step:
    """Small ones, in whole ticks; a collective takes all of the core or none of it."""

    def collective() -> Collective:
        wire_s = draw(WHOLE)
        return Collective(draw(WHOLE), wire_s, wire_s * draw(st.integers(0, 1)), draw(WHOLE))

    buckets = draw(st.integers(1, 4))
    exchanges = [
        Exchange(
            [collective() for _ in range(draw(st.integers(0, 3)))],
            *(draw(WHOLE), draw(WHOLE), draw(WHOLE)),
        )
        for _ in range(buckets)
    ]
    gathers = [Exchange([collective()], draw(WHOLE), draw(WHOLE)) for _ in range(draw(st.integers(0, 4)))]
    left = len(gathers)
    forward = []
    for _ in range(draw(st.integers(0, 3))):
        forward.append(Part(needs := draw(st.integers(0, left)), draw(WHOLE)))
        left -= needs
    arrivals = []
    for _ in range(draw(st.integers(0, 6))):
        needs = draw(st.integers(0, left))
        arrivals.append(Arrival(draw(WHOLE), draw(WHOLE), draw(st.integers(0, buckets - 1)), needs))
        left -= needs
    return Step(
        draw(WHOLE),
        arrivals,
        draw(WHOLE),
        exchanges,
        after_s=draw(WHOLE),
        forward=forward,
        gathers=gathers[: len(gathers) - left],
        ahead_bytes=draw(st.none() | WHOLE),
        limit_bytes=draw(st.just(math.inf) | WHOLE),
    )


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """One to three passes."""
    return replace(draw(passes()), earlier=[replace(one, after_s=0) for one in draw(st.lists(passes(), max_size=2))])


@given(steps())
@settings(max_examples=200, deadline=None)
def test_the_schedule_is_that_of_an_oracle_of_ticks(step: Step) -> None:
    found = replay(step)
    assert (found.step_s, found.wait_s) == pytest.approx(oracle(step))


@given(steps(), st.floats(1, 5))
@settings(deadline=None)
def test_one_collective_a_bucket_that_is_slower_makes_no_step_faster(step: Step, factor: float) -> None:
    single = [replace(e, collectives=e.collectives[:1]) for e in step.exchanges]
    slow = [
        replace(e, collectives=[replace(c, wire_s=c.wire_s * factor, cpu_s=c.cpu_s * factor) for c in e.collectives])
        for e in single
    ]
    before, after = (replay(replace(step, exchanges=exchanges)) for exchanges in (single, slow))
    # A faster exchange may be decoded before another bucket starts, which then starts later by that time.
    decoding_s = sum(e.after_s for e in single)
    assert after.step_s >= before.step_s - decoding_s - 1e-9
    assert before.step_s >= before.compute_s - 1e-9
