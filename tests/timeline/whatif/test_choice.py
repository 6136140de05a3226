"""The choice of a compression follows from the measurements, and stays with none where nothing pays."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.compression.coding_cost import CodingCost
from hvdtrain.compression.table import Compression
from hvdtrain.plan.gradients import Gradient, spread_evenly
from hvdtrain.plan.plan import Plan, Ranks
from hvdtrain.timeline.whatif.assemble import Costs
from hvdtrain.timeline.whatif.evidence import Evidence, FittedLink, Job
from hvdtrain.timeline.whatif.links import Link
from hvdtrain.timeline.whatif.predict import choose_compression

BUCKETS = 4
GRADIENTS = [Gradient(f"g{number}", (1024, 1024)) for number in range(BUCKETS)]
"""16 MiB: 16.8 MB, which 2 ranks send in 134 ms at 1 Gbit/s."""
CANDIDATES = ["fp16", "int8"]
CODING_S = {"none": 0.005, "fp16": 0.006, "int8": 0.02}


def evidence(bytes_per_s: float, wait_s: float, ranks: int = 2, backward_s: float = 0.05) -> Evidence:
    """A step of 450 ms and what it waited, on hosts of one rank each."""
    parts = {"data": 0.0, "copy": 0.0, "forward": 0.4 - backward_s, "clip": 0.0, "optimizer": 0.05, "rest": 0.0}
    return Evidence(
        job=Job(Ranks(ranks, 1), Plan(), ranks, 1),
        cores=8,
        own_cores=8,
        threads=1,
        on_cpu=True,
        gradients=spread_evenly(GRADIENTS, backward_s),
        step_s=0.45 + wait_s,
        parts_s={**parts, "backward": backward_s, "wait": wait_s},
        buckets=[[gradient.name] for gradient in GRADIENTS],
        fitted=FittedLink(Link(1e-6, 1 / bytes_per_s), "", 0.0),
    )


def coding(seconds: dict[str, float]) -> Costs:
    """All of it when the buckets are decoded."""

    def costs(compression: Compression, bucket: object, ranks: int) -> CodingCost:
        return CodingCost([0.0], [0.0] * 2, [0.0] * 2, seconds[str(compression)] / BUCKETS, 0.0)

    return costs


COSTS = coding(CODING_S)


@pytest.mark.parametrize(
    ("bytes_per_s", "wait_s", "coding_s", "chosen"),
    [
        (1e10, 0.001, CODING_S, "none"),
        (125e6, 0.1, CODING_S, "fp16"),  # of equals the first is taken
        (10e6, 1.55, CODING_S, "int8"),
        (125e6, 0.1, {"none": 0.005, "fp16": 0.2, "int8": 0.5}, "none"),
    ],
)
def test_a_slow_link_is_worth_coding_that_costs_less(
    bytes_per_s: float, wait_s: float, coding_s: dict[str, float], chosen: str
) -> None:
    found, predicted = choose_compression(evidence(bytes_per_s, wait_s), CANDIDATES, coding(coding_s))
    assert found == chosen and list(predicted) == ["none", *CANDIDATES]


@settings(max_examples=30, deadline=None)
@given(st.floats(1e7, 1e10), st.floats(0.01, 0.4), st.sampled_from([2, 4, 16]))
def test_a_slower_link_never_makes_compression_worse_than_before(
    bytes_per_s: float, backward_s: float, ranks: int
) -> None:
    """What fp16 wins does not shrink as the link gets slower, if steps wait for as long as the link explains."""

    def gain(rate: float) -> float:
        measured = evidence(rate, 0.0, ranks, backward_s)
        waited_s = choose_compression(measured, [], COSTS)[1]["none"].replayed_wait_s
        measured = replace(measured, step_s=measured.step_s + waited_s)
        predicted = choose_compression(measured, ["fp16"], COSTS)[1]
        return predicted["none"].step_s - predicted["fp16"].step_s

    assert gain(bytes_per_s / 2) >= gain(bytes_per_s) - CODING_S["fp16"], "decoding may no longer hide"


@given(st.floats(1e7, 1e11), st.floats(0, 2), st.sampled_from(CANDIDATES))
def test_no_more_is_won_than_the_exchange_gets_shorter(bytes_per_s: float, wait_s: float, candidate: str) -> None:
    """A wait for a rank that is late is not a wait for the link."""
    predicted = choose_compression(evidence(bytes_per_s, wait_s), [candidate], COSTS)[1]
    plain, own = predicted["none"], predicted[candidate]
    assert plain.step_s - own.step_s <= plain.wire_s - own.wire_s + CODING_S["none"] + 1e-6
