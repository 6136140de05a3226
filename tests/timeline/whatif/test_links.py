"""What collectives take, and the link that explains what they took."""

from __future__ import annotations

import dataclasses
import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.compression.sizes import sent_bytes
from hvdtrain.timeline.whatif.links import (
    ONE_HOST,
    Algorithm,
    Link,
    Ranks,
    collective_s,
    fit_allreduces,
    with_bandwidth,
)

LINK = Link(1e-5, 1e-9)
KINDS = st.sampled_from(["allreduce", "allgather", "alltoall"])


def test_by_hand() -> None:
    """4 hosts: 2 x 2 messages to negotiate; a ring of 6 messages and 1.5 of the bytes, a tree of 2 and twice them."""

    def seconds(kind: str, nbytes: int, algorithm: Algorithm = "auto") -> float:
        return collective_s(LINK, Ranks(4, 1), kind, nbytes, algorithm)[0]

    assert seconds("allreduce", 1000, "ring") == pytest.approx(4e-5 + 6e-5 + 1.5e-6)
    assert seconds("allreduce", 1000, "tree") == seconds("allreduce", 1000) == pytest.approx(4e-5 + 2e-5 + 2e-6)
    assert seconds("allreduce", 1 << 30) == seconds("allreduce", 1 << 30, "ring"), "auto takes the faster one"
    assert seconds("allgather", 1000) == pytest.approx(4e-5 + 3e-5 + 3e-6)
    assert seconds("alltoall", 1000) == pytest.approx(4e-5 + 3e-5 + 0.75e-6)


@pytest.mark.parametrize(
    ("kind", "algorithm", "expected"),
    [("allreduce", "ring", 1.5e-6), ("allreduce", "tree", 2e-6), ("alltoall", "auto", 1e-6)],
)
def test_ranks_of_a_host_share_its_link(kind: str, algorithm: Algorithm, expected: float) -> None:
    """A ring crosses it once; in an alltoall each of 2 ranks sends half of its bytes to the other host."""
    assert collective_s(Link(0.0, 1e-9), Ranks(4, 2), kind, 1000, algorithm)[0] == pytest.approx(expected)


@given(KINDS, st.integers(2, 4096), st.integers(1, 1 << 30), st.floats(0.01, 400), st.floats(1, 10))
def test_a_faster_link_takes_no_longer(kind: str, size: int, nbytes: int, gbit: float, factor: float) -> None:
    ranks = Ranks(size, 1)
    slow, fast = (collective_s(with_bandwidth(LINK, g), ranks, kind, nbytes)[0] for g in (gbit, gbit * factor))
    assert fast <= slow * (1 + 1e-9)
    without = Link(LINK.hop_s, 0.0)
    assert collective_s(without, ranks, kind, nbytes)[0] == pytest.approx(collective_s(without, ranks, kind, 0)[0])


@given(st.integers(2, 4095), st.integers(1, 1 << 30), st.sampled_from(get_args(Algorithm)))
def test_more_ranks_take_no_less_for_an_allreduce(size: int, nbytes: int, algorithm: Algorithm) -> None:
    few, more = (collective_s(LINK, Ranks(n, 1), "allreduce", nbytes, algorithm)[0] for n in (size, size + 1))
    assert more >= few * (1 - 1e-9)


@given(KINDS, st.integers(2, 512), st.integers(1, 1 << 30))
def test_bytes_are_those_of_the_exchange_itself(kind: str, size: int, nbytes: int) -> None:
    free = Link(0.0, 1e-9)
    seconds = collective_s(free, Ranks(size, 1), kind, nbytes)[0]
    assert seconds == pytest.approx(1e-9 * sent_bytes({kind: nbytes}, size))


@given(st.floats(1e-6, 1e-3), st.floats(1e-11, 1e-6), st.integers(2, 64))
def test_a_link_is_found_again_in_what_it_took(hop_s: float, s_per_byte: float, size: int) -> None:
    ranks, link = Ranks(size, 1), Link(hop_s, s_per_byte)
    sizes = [4 << exponent for exponent in (0, 10, 15, 18, 21)]
    pairs = [(n, 3 * math.ceil(math.log2(size)) * hop_s + 2 * (size - 1) / size * n * s_per_byte) for n in sizes]
    found = fit_allreduces(pairs, ranks)
    assert found.s_per_byte == pytest.approx(link.s_per_byte, rel=1e-3)
    assert found.hop_s >= hop_s


def test_nothing_is_fitted_to_nothing() -> None:
    for pairs, size in (([], 2), ([(1, 1.0)], 2), ([(1, 1.0), (1, 1.0)], 2), ([(1, 1.0), (2, 2.0)], 1)):
        assert fit_allreduces(pairs, Ranks(size, 1)) is None


def test_what_a_link_lets_pass_at_once_makes_it_no_faster() -> None:
    """1 Gbit/s after 200 KB at once, as a shaper or a switch's buffer has it."""
    burst, s_per_byte = 200_000, 8e-9
    seconds = [(n, 1e-4 + max(0, n - burst) * s_per_byte) for n in (1 << 10, 1 << 18, 1 << 20)]
    between = fit_allreduces(seconds, Ranks(2, 1))
    assert between.s_per_byte == pytest.approx(s_per_byte)
    late = [(n, 1e-4 + 1e-4 * (n > 1 << 10) + n * 1e-9) for n in (1 << 10, 1 << 14, 1 << 24)]
    inside = fit_allreduces(late, Ranks(2, 2))
    assert inside is not None and inside.s_per_byte == pytest.approx(1e-9, rel=0.02)


def test_algorithms_of_many_ranks_by_hand() -> None:
    """8 hosts with 8 ranks: 2 x 3 rounds across hosts and 2 x 3 inside to negotiate; messages inside take less."""
    ranks, link = Ranks(64, 8), Link(1e-4, 1e-9)
    negotiation_s = 2 * (3 * 1e-4 + 3 * ONE_HOST.hop_s)

    def seconds(algorithm: Algorithm) -> float:
        return collective_s(link, ranks, "allreduce", 1e6, algorithm)[0] - negotiation_s

    assert seconds("ring") == pytest.approx(126 * 1e-4 + 2 * 63 / 64 * 1e-3)
    assert seconds("tree") == pytest.approx(3 * 1e-4 + 3 * ONE_HOST.hop_s + 3 * 8 * 1e-3)
    assert seconds("double_tree") == pytest.approx(6 * 1e-4 + 14 * ONE_HOST.hop_s + 2 * 7 / 8 * 1e-3)
    assert seconds("auto") == seconds("ring")
    by_nccl = dataclasses.replace(link, by_nccl=True)
    assert collective_s(by_nccl, ranks, "allreduce", 1e6)[0] - negotiation_s == pytest.approx(seconds("double_tree"))


def test_the_latency_of_a_link_is_that_across_hosts() -> None:
    ranks, link = Ranks(64, 8), Link(1e-4, 1e-9)
    pairs = [(n, collective_s(link, ranks, "allreduce", n, "tree")[0]) for n in (4,)]
    found = fit_allreduces([*pairs, (1 << 20, 1.0), (1 << 23, 2.0)], ranks)
    assert found.hop_s == pytest.approx(1e-4, rel=1e-3)
