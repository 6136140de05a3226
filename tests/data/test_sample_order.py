"""Sources with weights: exact shares, whole passes, and an order that depends on position only."""

import itertools
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.data.mixture import Mixture, sample_order, whole_weights
from hvdtrain.data.order import SampleOrder, mixing_pattern, sample_indices
from hvdtrain.errors import DataError

SOURCES = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 30)), min_size=1, max_size=6)


def an_order(sources, seed=5):
    return SampleOrder(sum(length for length, _ in sources), sources, seed)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8))
def test_each_prefix_has_each_source_by_its_share(weights):
    turns, before = mixing_pattern(tuple(weights))
    counts = [0] * len(weights)
    for n, (source, had) in enumerate(zip(turns, before, strict=True), 1):
        assert had == counts[source]
        counts[source] += 1
        assert all(abs(c - Fraction(n * w, sum(weights))) < 1 for c, w in zip(counts, weights, strict=True))
    assert counts == weights  # so it can repeat


@settings(max_examples=40, deadline=None)
@given(SOURCES, st.integers(0, 99))
def test_each_source_is_used_whole_before_it_repeats(sources, seed):
    order = an_order(sources, seed)
    indices = order.indices(np.arange(200)).tolist()
    begin = 0
    for number, (length, _) in enumerate(sources):
        own = [index - begin for index in indices if begin <= index < begin + length]
        assert len(own) == order.count(number, 200)
        passes = [own[at : at + length] for at in range(0, len(own), length)]
        assert all(len(set(used)) == len(used) for used in passes)
        begin += length
    assert max(indices) < begin


@given(SOURCES, st.lists(st.integers(0, 10**12), min_size=1, max_size=20))
def test_an_index_depends_on_its_position_only(sources, positions):
    order = an_order(sources)
    together = order.indices(np.array(positions)).tolist()
    assert together == [int(order.indices(np.array([p]))[0]) for p in positions]
    for p in positions:
        source, rank = order.split(np.array([p]))
        assert order.count(int(source[0]), p) == int(rank[0])


@settings(max_examples=40, deadline=None)
@given(SOURCES)
def test_an_epoch_ends_when_the_last_source_has_been_used_whole(sources):
    order = an_order(sources)
    epoch, total = order.epoch_samples, order.samples
    assert len(set(order.indices(np.arange(epoch)).tolist())) == total
    assert len(set(order.indices(np.arange(epoch - 1)).tolist())) == total - 1


def test_without_weights_the_order_is_that_of_one_source():
    order = sample_order(["x"] * 23, 23, 4)
    assert order.indices(np.arange(60)).tolist() == sample_indices(np.arange(60), 23, 4).tolist()
    assert order.epoch_samples == 23


def test_sources_and_epochs_differ_in_their_order():
    order = an_order([(40, 1), (40, 1)])
    drawn = order.indices(np.arange(160)).tolist()
    orders = [[i % 40 for i in drawn if i // 40 == source] for source in (0, 1)]
    parts = [part for own in orders for part in (own[:40], own[40:])]
    assert all(a != b for a, b in itertools.combinations(parts, 2))


def test_a_mixture_is_its_parts():
    mixture = Mixture([["a", "b"], ["c"]], [0.5, 1.5])
    assert [mixture[i] for i in range(len(mixture))] == ["a", "b", "c"]
    drawn = sample_order(mixture, 3, 0).indices(np.arange(8)).tolist()
    assert Counter(mixture[i] for i in drawn) == {"a": 1, "b": 1, "c": 6}


@pytest.mark.parametrize(
    ("weights", "whole"),
    [([0.7, 0.3], (7, 3)), ([0.25, 0.2], (5, 4)), ([2, 4], (1, 2)), ([1], (1,)), ([1e-3, 0.999], (1, 999))],
)
def test_weights_are_exact(weights, whole):
    assert whole_weights(weights, len(weights)) == whole


@pytest.mark.parametrize(
    ("weights", "found"),
    [
        ([0.5], "0.5"),
        ([], "none"),
        ([1, 0], "1, 0"),
        ([1, -1], "1, -1"),
        ([float("nan"), 1], "nan, 1"),
        ([float("inf"), 1], "inf, 1"),
    ],
)
def test_weights_that_are_wrong(weights, found):
    with pytest.raises(DataError, match="invalid weights") as caught:
        whole_weights(weights, 2)
    assert caught.value.found == found


def test_weights_with_too_many_digits_are_answered_with_rounded_ones():
    with pytest.raises(DataError, match="too many digits") as caught:
        whole_weights([0.1234567, 0.5], 2)
    assert caught.value.next_step == "round them, such as [0.198, 0.802]"
    assert sum(whole_weights([0.198, 0.802], 2)) == 500
