"""The prediction for more ranks: laws, and the formula of a ring."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.doctor.links.expected import COMPRESSIONS, assumed_run, outlook
from hvdtrain.doctor.links.measured import Direction, Links
from hvdtrain.errors import ConfigError
from hvdtrain.plan.plan import Ranks
from hvdtrain.timeline.whatif.read_run import read_evidence
from tests.support.whatif_run import run_folder


def links(gbit: float = 10.0, latency_us: float = 20.0, hosts: int = 2) -> Links:
    names = [f"n{i}" for i in range(hosts)]
    ways = [Direction(a, b, latency_us * 1e-6, gbit / 8e-9) for a in names for b in names if a != b]
    return Links(names, [*ways, *(Direction(a, a, 1e-6, 1e10) for a in names)], "MPI")


def model(parameters: int = 15_000_000, step_s: float = 0.45, on_cpu: bool = False):  # type: ignore[no-untyped-def]
    return assumed_run(parameters, step_s, 8, 4, on_cpu=on_cpu)


SIZES = st.tuples(st.integers(10_000, 10**8), st.floats(1e-3, 10.0), st.floats(0.01, 400.0), st.integers(1, 8))


@settings(max_examples=5)
@given(SIZES)
def test_one_rank_is_efficient_by_definition_and_none_is_more_so(sizes: tuple[int, float, float, int]) -> None:
    parameters, step_s, gbit, per_host = sizes
    found = outlook(model(parameters, step_s), links(gbit), per_host)
    assert found.rows[0].ranks == Ranks(1, 1)
    assert set(found.rows[0].efficiency.values()) == {1.0}
    assert found.rows[0].step_s["none"] == pytest.approx(step_s)
    for row in found.rows:
        for name in COMPRESSIONS:
            assert row.efficiency[name] <= 1.0 + 1e-9
            assert row.efficiency[name] == pytest.approx(step_s / row.step_s[name])


@settings(max_examples=5)
@given(SIZES, st.floats(1.1, 10.0))
def test_less_bandwidth_is_never_faster(sizes: tuple[int, float, float, int], times: float) -> None:
    parameters, step_s, gbit, per_host = sizes
    fast, slow = (outlook(model(parameters, step_s), links(rate), per_host) for rate in (gbit, gbit / times))
    for before, after in zip(fast.rows, slow.rows, strict=True):
        # Collectives that take turns may end a little sooner if one of them takes longer (Graham's anomalies).
        assert all(after.step_s[name] >= before.step_s[name] * (1 - 2e-3) for name in COMPRESSIONS)


@pytest.mark.parametrize("per_host", [1, 4])
@pytest.mark.parametrize("gbit", [0.1, 1.0])
def test_a_slow_link_costs_the_time_of_a_ring(gbit: float, per_host: int) -> None:
    """2 (h - 1) / h of the bytes leave each of h hosts: NCCL's double tree sends them once for all ranks of a host."""
    parameters = 100_000_000
    found = outlook(model(parameters, 0.010), links(gbit, latency_us=0.0), per_host)
    for row in found.rows:
        hosts = row.ranks.hosts
        if hosts > 1:
            ring_s = 2 * (hosts - 1) / hosts * 4 * parameters / (gbit / 8e-9)
            assert row.step_s["none"] == pytest.approx(ring_s, rel=0.05)


def test_fp16_sends_half_the_bytes_and_the_slowest_link_decides() -> None:
    even = outlook(model(10**8, 0.01), links(0.1), 1).rows[1]
    assert even.step_s["fp16"] == pytest.approx(even.step_s["none"] / 2, rel=0.05)
    found = links(0.1)
    fast = [replace(way, bytes_per_s=1e9) if way.source == "n0" else way for way in found.ways]
    lame = outlook(model(10**8, 0.01), replace(found, ways=fast), 1).rows[1]
    assert lame.step_s["none"] == pytest.approx(even.step_s["none"])


def test_a_fast_link_hides_all_of_it() -> None:
    found = outlook(model(1_000_000, 1.0), links(400.0, 1.0), 1)
    assert all(row.efficiency["none"] > 0.98 for row in found.rows)


def test_predictions_for_more_hosts_than_measured_are_marked() -> None:
    found = outlook(model(), links(hosts=3), 2)
    shapes = [(1, 1), (1, 2), (2, 4), (3, 6), (6, 12), (12, 24), (24, 48)]
    assert [(row.ranks.hosts, row.ranks.size) for row in found.rows] == shapes
    assert [row.beyond for row in found.rows] == [False] * 4 + [True] * 3
    text = "\n".join(found.lines())
    assert "6*" in text and "3*" not in text and "not in the model" in text


def test_a_run_of_ranks_that_divide_the_model_is_refused(tmp_path: Path) -> None:
    parallel = {"parallel": {"compression": "none", "pp": 2}, "train": {"global_batch": 16, "micro_batch": 4}}
    evidence = read_evidence(run_folder(tmp_path / "run", size=2, local_size=2, options=parallel))
    with pytest.raises(ConfigError, match=r"with --parallel.pp 2 says nothing about single ranks"):
        outlook(evidence, links(), 1)


def test_one_host_gives_no_information_about_links_between_hosts() -> None:
    found = outlook(model(), links(hosts=1), 4)
    assert [row.ranks.size for row in found.rows] == [1, 4]
    assert any("--hosts a,b" in note for note in found.notes)


@pytest.mark.parametrize(("size", "passes"), [(1, 1), (1, 4), (2, 2)])
def test_a_prediction_from_a_run_keeps_the_work_of_a_rank(tmp_path: Path, size: int, passes: int) -> None:
    """A rank's work is that of the run, whatever the number of ranks."""
    evidence = read_evidence(run_folder(tmp_path / "run", size=size, local_size=size, passes=passes))
    found = outlook(evidence, links(1.0), 2)
    assert found.rows[0].step_s["none"] == pytest.approx(evidence.step_s, rel=0.1)
    assert all(row.step_s["none"] > 0.95 * evidence.step_s for row in found.rows)
    assert found.rows[-1].efficiency["none"] < found.rows[1].efficiency["none"] <= 1.05
    assert not any(note.startswith("the model:") for note in found.notes)
