"""The choice of a compression follows from what was measured, and stays with none where nothing pays."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.compression.sizes import Bucket, sent_bytes
from hvdtrain.compression.table import Compression, parse
from hvdtrain.exchange.choice import Measured, choose, predict

MIB = 1 << 20
BUCKETS = [Bucket([(1024, 1024)], "float32", MIB)] * 4
"""16 MiB: 16.8 MB, which 2 ranks send in 134 ms at 1 Gbit/s."""
CANDIDATES = [parse("fp16"), parse("int8")]
SLOW = Measured(
    step_s=0.45 + 0.1,
    exposed_s=0.1,
    latency_s=1e-4,
    bytes_per_s=125e6,
    ranks=2,
    buckets=BUCKETS,
    cost_s={"none": 0.005, "fp16": 0.006, "int8": 0.02},
)


def test_a_fast_link_needs_none() -> None:
    fast = replace(SLOW, step_s=0.451, exposed_s=0.001, bytes_per_s=1e10)
    assert choose(fast, CANDIDATES)[0] == "none"


def test_a_slow_link_is_worth_it_and_of_equals_the_first_is_taken() -> None:
    chosen, predictions = choose(SLOW, CANDIDATES)
    assert [p.compression for p in predictions] == ["none", "fp16", "int8"]
    assert chosen == "fp16"
    assert choose(replace(SLOW, step_s=2.0, exposed_s=1.55, bytes_per_s=10e6), CANDIDATES)[0] == "int8"


def test_a_costly_coding_does_not_pay() -> None:
    costly = replace(SLOW, cost_s={"none": 0.005, "fp16": 0.2, "int8": 0.5})
    assert choose(costly, CANDIDATES)[0] == "none"


def test_none_is_predicted_as_it_was_measured() -> None:
    assert predict(SLOW, parse("none")).step_s == pytest.approx(SLOW.step_s)
    assert choose(SLOW, CANDIDATES)[1][0].step_s == SLOW.step_s


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_bytes_are_those_of_the_algorithms_that_send_least(ranks: int) -> None:
    assert sent_bytes({"allreduce": 1000}, ranks) == pytest.approx(2000 * (ranks - 1) / ranks)
    # An alltoall of everything and an allgather of the shares are such an allreduce in two halves.
    halves = {"alltoall": 1000, "allgather": 1000 // ranks}
    assert sent_bytes(halves, ranks) == pytest.approx(sent_bytes({"allreduce": 1000}, ranks), rel=0.01)


@given(st.floats(1e6, 1e11), st.floats(0, 1), st.integers(2, 64))
def test_a_slower_link_never_makes_compression_worse_than_before(bytes_per_s: float, hidden: float, ranks: int) -> None:
    """With the same part of the way hidden, what fp16 wins does not shrink as the link gets slower."""

    def gain(rate: float) -> float:
        wire_s = sum(sent_bytes(parse("none").payload(b, ranks), ranks) for b in BUCKETS) / rate
        exposed_s = wire_s * (1 - hidden)
        measured = replace(
            SLOW, ranks=ranks, bytes_per_s=rate, latency_s=0.0, step_s=1 + exposed_s, exposed_s=exposed_s
        )
        return measured.step_s - predict(measured, parse("fp16")).step_s

    assert gain(bytes_per_s / 2) >= gain(bytes_per_s) * (1 - 1e-9) - 1e-6


@given(st.floats(1e6, 1e12), st.floats(0, 2), st.sampled_from(CANDIDATES))
def test_no_more_is_won_than_the_way_gets_shorter(bytes_per_s: float, exposed_s: float, candidate: Compression) -> None:
    """Waiting for a rank that is late is no waiting for the link."""
    measured = replace(SLOW, step_s=3.0, exposed_s=exposed_s, bytes_per_s=bytes_per_s)
    plain, own = choose(measured, [candidate])[1]
    assert plain.step_s - own.step_s <= plain.wire_s - own.wire_s + 1e-9
