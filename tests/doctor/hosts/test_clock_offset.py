from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.doctor.hosts.network_checks import largest_offset
from hvdtrain.doctor.hosts.survey import Offset, estimate_offset

NS = st.integers(0, 10**9)


@given(st.integers(-(10**12), 10**12), st.lists(st.tuples(NS, NS), min_size=1, max_size=8))
def test_the_true_offset_is_within_the_error(true_ns: int, ways: list[tuple[int, int]]) -> None:
    """However long questions and answers are under way, and however unlike."""
    sent, looks = 10**15, []
    for there_ns, back_ns in ways:
        looks.append((sent, sent + there_ns + true_ns, sent + there_ns + back_ns))
        sent += 10**10
    found = estimate_offset(looks)
    assert abs(found.ahead_s - true_ns * 1e-9) <= found.error_s + 1e-6
    assert found.error_s <= min(sum(way) for way in ways) / 2e9 + 1e-12


def test_the_two_that_are_furthest_apart_are_named() -> None:
    offsets = {"a": Offset(0.0, 0.1), "b": Offset(-2.0, 0.2), "c": Offset(3.0, 0.3)}
    assert largest_offset(offsets) == ("b", "c", Offset(5.0, 0.5))
