"""Predictions from a made-up run: what must hold of them, whatever the model; the expected maximum over ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.errors import ConfigError
from hvdtrain.plan.gradients import Gradient
from hvdtrain.plan.plan import Ranks
from hvdtrain.timeline.whatif.evidence import Change, Jitter, changed_job
from hvdtrain.timeline.whatif.links import ETHERNET
from hvdtrain.timeline.whatif.predict import predict
from hvdtrain.timeline.whatif.read_run import read_evidence
from tests.support.whatif_run import GBIT, MIB, PARTS, run_folder

COMPUTE_S = sum(PARTS.values()) / 1e3


def _ms(path: Path, **change: object) -> float:
    return predict(read_evidence(path), Change(**change)).then.step_s * 1e3  # type: ignore[arg-type]


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """2 hosts of many cores, 1 rank each; 9 ms of an exchange of 8 MiB at 1 Gbit/s were waited for."""
    return run_folder(tmp_path / "pair", size=2, wait_ms=9.0, link=GBIT)


@pytest.fixture
def alone(tmp_path: Path) -> Path:
    """1 rank of 4 micro-batches."""
    return run_folder(tmp_path / "alone", passes=4)


@pytest.mark.parametrize("wait_ms", [0.0, 9.0, 200.0])
@pytest.mark.parametrize("cores", [1, 8])
@pytest.mark.parametrize("link", [(), GBIT])
def test_unchanged_it_is_what_was_measured(
    tmp_path: Path, wait_ms: float, cores: int, link: list[tuple[int, float]]
) -> None:
    path = run_folder(tmp_path / "run", size=2, wait_ms=wait_ms, cores=cores, link=link)
    found = predict(read_evidence(path), Change())
    assert found.then.step_s == pytest.approx(COMPUTE_S + wait_ms / 1e3)
    assert found.now.step_s == pytest.approx(found.then.step_s)
    assert found.low_s <= found.then.step_s <= found.high_s


def test_an_infinitely_fast_link_leaves_computing(pair: Path) -> None:
    found = predict(read_evidence(pair), Change(bandwidth_gbit=1e9, latency_us=0))
    assert found.then.exposed_s <= found.now.exposed_s
    assert found.then.wire_s == pytest.approx(0, abs=1e-4)
    assert found.then.compute_s == pytest.approx(found.now.compute_s, rel=1e-3)


def test_a_slower_link_costs_what_no_longer_hides(pair: Path) -> None:
    found = [_ms(pair, bandwidth_gbit=gbit) for gbit in (100, 10, 1, 0.3, 0.1, 0.01)]
    assert found == sorted(found)
    way_ms = 8 * MIB * 8 / (ETHERNET * 0.01e9) * 1e3
    hidden_ms = PARTS["backward"] - 60
    assert found[-1] == pytest.approx(way_ms - hidden_ms + COMPUTE_S * 1e3, rel=0.005)


def test_one_rank_exchanges_nothing_and_waits_for_no_other(pair: Path, tmp_path: Path) -> None:
    """Of two, one waited for what no exchange explains."""
    late = run_folder(tmp_path / "run", size=2, wait_ms=300.0, late_ms=295.0, link=GBIT)
    for path in (pair, late):
        found = predict(read_evidence(path), Change(size=1, global_batch=4)).then
        assert (found.wire_s, found.handed_bytes, found.buckets) == (0, 0, 0)
        assert found.step_s == pytest.approx(COMPUTE_S, rel=0.01)
    assert _ms(late, compression="topk") > 1e3 * COMPUTE_S + 200, "two still do"


def test_more_ranks_of_as_much_work_each_take_no_less(pair: Path) -> None:
    found = [_ms(pair, size=n, global_batch=4 * n, algorithm="ring") for n in (2, 3, 4, 16, 256, 4096)]
    assert found == sorted(found)


def test_ranks_share_out_the_global_batch(alone: Path) -> None:
    """Forward and backward of 4 micro-batches; 2 ranks have 2 each."""
    one, two = (predict(read_evidence(alone), Change(size=n)).then for n in (1, 2))
    assert one.step_s == pytest.approx(COMPUTE_S)
    spread_ms = PARTS["forward"] + PARTS["backward"] + PARTS["data"] + PARTS["copy"]
    assert two.compute_s * 1e3 == pytest.approx(COMPUTE_S * 1e3 - spread_ms / 2, abs=2)
    few = replace(read_evidence(alone), gradients=[Gradient("e", (8192, 320), ready_s=1.0, rows=100)])
    assert [few.buckets_of(changed_job(few, Change(size=n)))[0].rows for n in (2, 4)] == [2 * 50, 4 * 25]
    idle = predict(read_evidence(alone), Change(size=8))
    assert any("4 of 8 ranks would be idle" in note for note in idle.notes)


def test_ranks_that_share_cores_compute_as_much_longer(tmp_path: Path) -> None:
    """As much work for each of 4 ranks on 2 cores as for 2, and the reverse."""
    for size, other, factor in ((2, 4, 2.3), (4, 2, 1 / 2.3), (2, 1, 1.0)):
        evidence = read_evidence(run_folder(tmp_path / f"{size}_{other}", size=size, local_size=size, cores=2))
        change = Change(size=other, ranks_per_host=other, global_batch=4 * other)
        found, data_s = predict(evidence, change), PARTS["data"] / 1e3
        assert found.then.compute_s - data_s == pytest.approx(factor * (found.now.compute_s - data_s), rel=0.03)
        assert (found.high_s - found.low_s > 0.4 * found.then.step_s) == (factor != 1)


def test_data_and_a_slow_rank_count_as_they_are_asked(pair: Path) -> None:
    now = _ms(pair)
    assert _ms(pair, data_ms=0) == pytest.approx(now - PARTS["data"])
    assert _ms(pair, data_ms=105) == pytest.approx(now + 100)
    slower_ms = 0.1 * (PARTS["copy"] + PARTS["forward"] + PARTS["backward"])
    # of the exchange, a longer backward hides a little more
    assert now + slower_ms - 5 < _ms(pair, slow_rank_percent=10) <= now + slower_ms


@pytest.mark.parametrize("size", [2, 8, 64])
@pytest.mark.parametrize(("late_in", "gain_ms"), [("data", 21.0), ("forward", 0.0)])
def test_loading_of_every_rank_is_predicted(late_in: str, gain_ms: float, size: int, tmp_path: Path) -> None:
    """Rank 0 waits 21 ms for the last rank, which waits for data, or computes longer."""
    path = run_folder(tmp_path / "run", size=size, wait_ms=21.5, late_ms=21.0, late_in=late_in)
    now = _ms(path)
    assert _ms(path, data_ms=0) == pytest.approx(now - PARTS["data"] - gain_ms, abs=0.5)
    assert _ms(path, data_ms=9) == pytest.approx(now - PARTS["data"] - gain_ms + 9, abs=0.5)


def test_compression_sends_what_its_formula_says_and_pays_on_a_slow_link(pair: Path) -> None:
    evidence = read_evidence(pair)
    plain, half = (predict(evidence, Change(compression=name, bandwidth_gbit=0.1)).then for name in ("none", "fp16"))
    assert half.handed_bytes == pytest.approx(plain.handed_bytes / 2)
    assert half.step_s < plain.step_s
    small = predict(evidence, Change(bucket_mib=1)).then
    assert small.buckets > predict(evidence, Change()).now.buckets
    assert small.handed_bytes == pytest.approx(plain.handed_bytes)


def test_unknown_parts_are_reported_and_widen_the_interval(pair: Path) -> None:
    evidence = read_evidence(pair)
    near, far = (predict(evidence, Change(size=n, global_batch=4 * n)) for n in (2, 4096))
    assert [any("extrapolated" in note for note in each.notes) for each in (near, far)] == [False, True]
    assert far.high_s - far.low_s > near.high_s - near.low_s
    many = Change(size=64, global_batch=256)
    unknown = predict(evidence, many)
    for algorithm in ("ring", "tree"):  # of 64 ranks nobody knows which one MPI takes
        assert unknown.low_s <= predict(evidence, replace(many, algorithm=algorithm)).then.step_s < unknown.high_s
    ring, hop_us = replace(many, algorithm="ring"), 1e6 * evidence.fitted.link.hop_s
    fitted, given = predict(evidence, ring), predict(evidence, replace(ring, latency_us=hop_us))
    assert given.then == fitted.then and given.high_s - given.low_s < fitted.high_s - fitted.low_s
    guessed = predict(evidence, Change(compression="powersgd:4"))
    assert any("--probe" in note for note in guessed.notes)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (Change(compression="zip"), "invalid compression"),
        (Change(size=0), "--size"),
        (Change(bandwidth_gbit=0.0), "--bandwidth_gbit"),
        (Change(bandwidth_gbit=float("nan")), "--bandwidth_gbit"),
        (Change(data_ms=-1.0), "--data_ms"),
        (Change(size=16), "--bandwidth_gbit"),
        (Change(size=2, bandwidth_gbit=1.0), "--ranks_per_host"),
    ],
)
def test_what_cannot_be_predicted_says_why(alone: Path, change: Change, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        predict(read_evidence(alone), change)


def test_a_rank_that_is_bound_to_its_core_shares_it_with_the_exchange(tmp_path: Path) -> None:
    folders = (run_folder(tmp_path / str(own), size=2, wait_ms=9.0, link=GBIT, own_cores=own) for own in (8, 1))
    free, bound = map(read_evidence, folders)
    assert not free.cores_are_full(Ranks(2, 1)) and bound.cores_are_full(Ranks(2, 1))
    assert free.cores_are_full(Ranks(8, 8))


def test_how_many_ranks_a_host_takes_follows_from_its_cores(alone: Path, pair: Path) -> None:
    assert predict(read_evidence(alone), Change(size=8)).job.ranks == Ranks(8, 8)
    assert predict(read_evidence(pair), Change(size=8)).job.ranks == Ranks(8, 1)
    assert predict(read_evidence(alone), Change(size=8, ranks_per_host=2, bandwidth_gbit=1)).job.ranks == Ranks(8, 2)


def _normal(ranks: int, steps: int) -> Jitter:
    return Jitter.from_times(1 + 0.01 * np.random.default_rng(0).standard_normal((ranks, steps)))


def test_one_rank_or_equal_ranks_wait_for_none() -> None:
    assert _normal(4, 50).expected_maximum_s(1) == 0
    assert Jitter.from_times(np.ones((4, 50))).expected_maximum_s(4096) == 0
    assert Jitter.from_times(np.empty((2, 0))).expected_maximum_s(8) == 0


@pytest.mark.parametrize(("ranks", "expected"), [(2, 0.564), (10, 1.539), (100, 2.508)])
def test_of_a_normal_distribution_it_is_what_the_tables_say(ranks: int, expected: float) -> None:
    found = _normal(8, 2000).expected_maximum_s(ranks)
    assert found == pytest.approx(0.01 * expected, rel=0.08)


def test_delays_common_to_all_ranks_cause_no_waiting() -> None:
    common = np.linspace(0, 5, 200)
    own = 0.01 * np.random.default_rng(2).standard_normal((4, 200))
    with_common, without = (Jitter.from_times(values).expected_maximum_s(4) for values in (own + common, own))
    assert with_common == pytest.approx(without)
    assert Jitter.from_times(common[None]).expected_maximum_s(64) < 0.2, "nor what lasts, of one rank alone"


def test_it_grows_with_ranks_beyond_the_measured_number() -> None:
    jitter = _normal(2, 30)
    found = [jitter.expected_maximum_s(n) for n in (2, 8, 64, 512, 4096)]
    assert found == sorted(found)
    assert found[-1] > jitter.deviations[-1], "later than any that was seen"
    assert jitter.reaches(60)
    assert not jitter.reaches(64)
