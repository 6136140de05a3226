"""Sets of intervals: laws against a count of moments."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.timeline.analysis.intervals import Span, common, length, partition, union, within, without

SETS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)


def _span(pairs: list[tuple[int, int]]) -> Span:
    return union(np.array([a for a, _ in pairs], float), np.array([b for _, b in pairs], float))


def _moments(span: Span) -> set[int]:
    return {t for a, b in zip(*span, strict=True) for t in range(int(a), int(b))}


@given(SETS, SETS)
def test_sets_hold_the_moments_that_they_should(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    one, other = _span(a), _span(b)
    assert _moments(one) == {t for low, high in a for t in range(low, high)}
    assert length(one) == len(_moments(one))
    assert (one[0][1:] > one[1][:-1]).all()
    assert _moments(common(one, other)) == _moments(one) & _moments(other)
    assert _moments(without(one, other)) == _moments(one) - _moments(other)


@given(SETS, st.integers(0, 40), st.integers(0, 40))
def test_what_lies_within_is_counted(a: list[tuple[int, int]], start: int, more: int) -> None:
    found = within(_span(a), np.array([float(start)]), np.array([float(start + more)]))
    assert found.tolist() == [len(_moments(_span(a)) & set(range(start, start + more)))]


@given(SETS, st.lists(SETS, max_size=4))
def test_a_partition_sums_to_the_whole_and_the_first_part_comes_first(
    whole: list[tuple[int, int]], parts: list[list[tuple[int, int]]]
) -> None:
    given_parts = {str(i): _span(part) for i, part in enumerate(parts)}
    cut = partition(_span(whole), given_parts)
    assert sum(map(length, cut.values())) == length(_span(whole))
    left = _moments(_span(whole))
    for name, part in given_parts.items():
        assert _moments(cut[name]) == left & _moments(part)
        left -= _moments(part)
