"""Which pairs of hosts measure in which round, outliers among measured links, and the table of links."""

from __future__ import annotations

import json
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.doctor.links.measured import (
    MOST_ROUNDS,
    MOST_S,
    Direction,
    Links,
    budget_s,
    check_links,
    link_table,
    rounds,
)
from hvdtrain.doctor.links.start_probe import _parse_links
from hvdtrain.doctor.report import Report

GBIT = 1.25e8


def links(hosts: str = "abcd", slow: dict[tuple[str, str], float] | None = None, **late: float) -> Links:
    """All at 10 Gbit/s and 20 us, but for some; within a host 80 Gbit/s and 1 us."""
    ways = [
        Direction(a, b, late.get(a + b, 20e-6), (slow or {}).get((a, b), 10.0) * GBIT)
        for a, b in permutations(hosts, 2)
    ]
    ways += [Direction(a, a, 1e-6, (slow or {}).get((a, a), 80.0) * GBIT) for a in hosts]
    return Links(list(hosts), ways, "MPI")


def wrong(found: Links, **plugs: int) -> dict[str, str]:
    return {finding.name: finding.found for finding in check_links(found, plugs) if finding.level != "ok"}


def test_similar_links_have_no_outlier() -> None:
    assert not wrong(links(), a=10000)
    assert _parse_links(f"noise\n{json.dumps(Report([], links=links()).as_data())}\n") == links()
    (between, inside) = check_links(links())
    assert "10 Gbit/s" in between.found and "20 us" in between.found and "80 Gbit/s" in inside.found


@pytest.mark.parametrize(
    ("found", "names"),
    [
        (links(slow={("a", "b"): 4.0}), ["slow a to b"]),
        (links(slow={("a", "b"): 6.0}), []),
        (links(slow={way: 1.0 for way in permutations("abcd", 2) if "c" in way}), ["slow c"]),  # once
        (links("ab", {("b", "a"): 1.0}), ["slow b to a"]),
        (links(slow={("d", "d"): 20.0}), ["slow d"]),
        (links(ab=200e-6), ["late links"]),
        (links(ab=50e-6), []),
    ],
)
def test_what_is_slow_is_named(found: Links, names: list[str]) -> None:
    assert list(wrong(found)) == names


def test_a_link_that_is_slower_than_its_plug_is_named() -> None:
    assert list(wrong(links(), b=40000, a=0)) == ["link of b"]


def test_a_table_has_a_cell_for_each_pair() -> None:
    found = links("ab", {("a", "b"): 0.095})
    text = [" ".join(line.split()) for line in link_table(found)[1:]]
    assert text == ["from / to a b", "a 80 1us 0.095 20us", "b 10 20us 80 1us"]
    missing = Links(["a", "b"], found.ways[:1], "TCP")
    assert link_table(missing)[-1].split() == ["b", "-", "-"]
    many = link_table(links("abcdefghijklmno", {("b", "c"): 0.5}))
    assert many[1].startswith("  b to c: 0.5 ") and len(many) == 13, "of many hosts the slowest"


@settings(max_examples=40)
@given(st.integers(0, 40))
def test_all_pairs_meet_once_and_no_host_is_twice_in_a_round(count: int) -> None:
    found = rounds(count)
    assert sorted(pair for pairs in found for pair in pairs) == list(permutations(range(count), 2))
    for pairs in found:
        there = [host for pair in pairs for host in pair]
        assert len(there) == len(set(there))
    assert len(found) <= 2 * count


@settings(max_examples=15)
@given(st.integers(66, 200))
def test_of_many_each_host_is_measured_with_as_many_as_there_is_time_for(count: int) -> None:
    found = rounds(count)
    assert len(found) == 2 * MOST_ROUNDS
    pairs = [pair for pairs in found for pair in pairs]
    assert len(pairs) == len(set(pairs)) and {host for pair in pairs for host in pair} == set(range(count))


@settings(max_examples=30)
@given(st.integers(1, 150))
def test_all_of_it_ends_in_time(count: int) -> None:
    assert 0 < budget_s(count) * (len(rounds(count)) + 1) <= MOST_S + 1e-9
