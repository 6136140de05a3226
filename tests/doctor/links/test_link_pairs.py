"""Which pairs of hosts measure in which round."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.doctor.links.link_pairs import MOST_ROUNDS, MOST_S, budget_s, rounds


@settings(max_examples=40)
@given(st.integers(0, 40))
def test_all_pairs_meet_once_and_no_host_is_twice_in_a_round(count: int) -> None:
    found = rounds(count)
    assert sorted(pair for pairs in found for pair in pairs) == list(combinations(range(count), 2))
    for pairs in found:
        there = [host for pair in pairs for host in pair]
        assert len(there) == len(set(there))
    assert len(found) <= count


@settings(max_examples=15)
@given(st.integers(66, 200))
def test_of_many_each_host_is_measured_with_as_many_as_there_is_time_for(count: int) -> None:
    found = rounds(count)
    assert len(found) == MOST_ROUNDS
    pairs = [pair for pairs in found for pair in pairs]
    assert len(pairs) == len(set(pairs)) and {host for pair in pairs for host in pair} == set(range(count))


@settings(max_examples=30)
@given(st.integers(1, 150))
def test_all_of_it_ends_in_time(count: int) -> None:
    assert 0 < budget_s(count) * (2 * len(rounds(count)) + 1) <= MOST_S + 1e-9
