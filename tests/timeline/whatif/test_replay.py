"""A replayed step: by hand, by an oracle of ticks, and what must hold of any."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.timeline.whatif.replay import Arrival, Collective, Exchange, Step, replay
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


def test_an_exchange_that_takes_the_core_is_paid_for_while_backward_runs() -> None:
    step = Step(0, [Arrival(2, 0, 0), Arrival(8, 0, 1)], 0, [_plain(4, 4), _plain(0)])
    assert replay(step).step_s == 14
    half = replace(step, exchanges=[_plain(4, 2), _plain(0)])
    assert replay(half).step_s == 12


def test_a_second_collective_begins_at_the_next_gradient_or_after_backward() -> None:
    """The first is over at 3; the next gradient comes at 7, what follows it at 8."""
    two = Exchange([Collective(0, 2), Collective(1, 5)], after_s=1)
    step = Step(0, [Arrival(1, 0, 0), Arrival(6, 0, 1)], 1, [two, _plain(1)])
    # 7: bucket 1 full, sent until 8; bucket 0's second made until 8, sent until 13; backward over at 9; decoded at 14
    assert replay(step).step_s == 14
    alone = replace(step, arrivals=[Arrival(1, 0, 0)], tail_s=7, exchanges=[two])
    # no gradient to go on at: made after backward at 9, sent until 14, decoded at 15
    assert replay(alone).step_s == 15


def test_what_backward_leaves_out_is_packed_and_sent_after_it() -> None:
    step = Step(0, [Arrival(5, 0, 0)], 0, [_plain(1), _plain(3)], late_s=[0, 2])
    assert replay(step).step_s == 10
    assert replay(step).wait_s == 5


WHOLE = st.integers(0, 6).map(float)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Small ones, in whole ticks; a collective takes all of the core or none of it."""
    buckets = draw(st.integers(1, 4))
    exchanges = []
    for _ in range(buckets):
        collectives = []
        for _ in range(draw(st.integers(0, 3))):
            wire_s = draw(WHOLE)
            cpu_s = wire_s * draw(st.integers(0, 1))
            collectives.append(Collective(draw(WHOLE), wire_s, cpu_s, draw(WHOLE)))
        exchanges.append(Exchange(collectives, draw(WHOLE)))
    arrivals = [
        Arrival(draw(WHOLE), draw(WHOLE), draw(st.integers(0, buckets - 1))) for _ in range(draw(st.integers(0, 6)))
    ]
    return Step(draw(WHOLE), arrivals, draw(WHOLE), exchanges, (), draw(WHOLE))


@given(steps())
@settings(max_examples=400, deadline=None)
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
