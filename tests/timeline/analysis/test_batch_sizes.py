"""Ranks with batches of unequal size: a matter of data, not of hardware."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hvdtrain.observe.past_journal import JournalStart
from hvdtrain.timeline.analysis.analyse import analyse
from hvdtrain.timeline.analysis.analysis import Analysis, Finding
from hvdtrain.timeline.columns import Floats, JournalSteps
from tests.support.journals import FACTS
from tests.support.step_tables import noise, run_of, table_of

MS_PER_1000 = 20.0


def _sizes(ranks: int, steps: int, seed: int) -> Floats:
    return np.random.default_rng(seed).integers(2000, 6000, (ranks, steps)).astype(float)


def _work(sizes: Floats, kind: str = "gaussian", seed: int = 0) -> Floats:
    return 100 + noise(np.random.default_rng(seed + 50), sizes.shape, kind, 1.0)


def _analysed(work: Floats, sizes: Floats, *, cost: float = MS_PER_1000, **more: Any) -> Analysis:
    table = table_of(work, more_ms={"backward": cost * sizes / 1e3})
    return analyse(run_of(replace(table, elements=sizes), **more))


def _of(found: Analysis, kind: str) -> list[Finding]:
    return [finding for finding in found.findings if finding.kind == kind]


@pytest.mark.parametrize("kind", ["gaussian", "heavy", "lasting"])
@pytest.mark.parametrize(("ranks", "steps"), [(2, 75), (4, 300), (64, 320)])
def test_unequal_batches_are_told_with_their_cost(ranks: int, steps: int, kind: str) -> None:
    sizes = _sizes(ranks, steps, 3)
    found = _analysed(_work(sizes, kind), sizes)
    (finding,) = _of(found, "batch_sizes")
    truth = MS_PER_1000 / 1e3 * (sizes.max(axis=0) - sizes.mean(axis=0))[2:].mean()
    assert finding.cost_ms == pytest.approx(truth, rel=0.1)
    assert not found.blame.late and not _of(found, "jitter") and "pack samples" in finding.advice


@pytest.mark.parametrize(
    ("longer", "slower_ms", "cost"),
    [(1.0, 15.0, MS_PER_1000), (1.5, 0.0, MS_PER_1000), (2.0, 15.0, 0.0)],
    ids=["a slow rank", "a rank with longer texts", "both, but texts cost nothing"],
)
def test_a_slow_rank_is_told_from_one_with_longer_texts(longer: float, slower_ms: float, cost: float) -> None:
    sizes = _sizes(4, 300, 6)
    sizes[1] *= longer
    work = _work(sizes)
    work[1] += slower_ms
    found = _analysed(work, sizes, cost=cost)
    assert found.blame.late == ([1] if slower_ms else [])
    assert bool(_of(found, "batch_sizes")) == (cost > 0)
    assert not slower_ms or found.blame.ranks[0].cost_ms.value == pytest.approx(slower_ms, rel=0.2)


@pytest.mark.parametrize("kind", ["gaussian", "heavy", "lasting"])
@pytest.mark.parametrize(("ranks", "steps", "noise_ms"), [(2, 20, 20.0), (2, 75, 3.0), (8, 200, 3.0), (32, 100, 3.0)])
def test_sizes_that_cost_nothing_are_no_finding(ranks: int, steps: int, noise_ms: float, kind: str) -> None:
    for seed in range(5):
        sizes = _sizes(ranks, steps, seed)
        work = 100 + noise(np.random.default_rng(seed), (ranks, steps), kind, noise_ms)
        assert not _of(_analysed(work, sizes, cost=0.0), "batch_sizes")
    assert not _of(_analysed(work, np.full_like(work, 4096.0)), "batch_sizes"), "of equal sizes"


@pytest.mark.parametrize(
    ("unit", "tokens", "padded"), [("tokens", 2800.0, True), ("samples", 2800.0, False), ("tokens", 3900.0, False)]
)
def test_padding_is_told_where_the_weight_counts_tokens(unit: str, tokens: float, padded: bool) -> None:
    sizes = np.full((4, 60), 1000.0)
    journal = JournalSteps(np.arange(1, 61), np.full(60, 100.0), {}, np.full(60, tokens))
    start = JournalStart({**FACTS, "size": 4, "time": 0.0, "unit": unit})
    found = _analysed(_work(sizes), sizes, journal=journal, start=start)
    assert bool(_of(found, "padding")) == padded


def test_micro_batches_that_follow_speed_are_no_unequal_batches() -> None:
    sizes = np.full((2, 200), 4000.0)
    sizes[0, 50:], sizes[1, 50:] = 6000.0, 2000.0
    shares = {"event": "shares", "at_step": 50, "shares": [3, 1], "pass_s": [0.02, 0.06]}
    found = _analysed(_work(sizes), sizes, start=JournalStart({}, events=[shares]))
    assert not _of(found, "batch_sizes")


def test_a_slow_rank_with_fewer_micro_batches_gets_no_more() -> None:
    work = noise(np.random.default_rng(0), (3, 200), "gaussian", 1.0) + np.array([[80.0], [80.0], [95.0]])
    found = analyse(run_of(table_of(work), config={"train": {"global_batch": 11, "micro_batch": 1}, "parallel": {}}))
    assert found.blame.late == [2]
    assert _of(found, "division")[0].advice.startswith("keep them: rank 2 ")


@pytest.mark.parametrize("late", [None, 1])
@pytest.mark.parametrize(
    ("passes", "options", "advice"),
    [
        ([2, 2, 1, 1], {}, "--train.global_batch 8"),
        ([4, 4, 2, 2], {"workers": 4, "sync": "diloco:8", "shares": "2,2,1,1"}, "--outer.shares 1,1,1,1"),
        ([2, 1, 1, 1, 2, 2], {"workers": 4, "sync": "diloco:8"}, "a multiple of 4 ranks"),
    ],
)
def test_unequal_numbers_of_unequal_batches_are_no_stragglers(
    passes: list[int], options: dict[str, Any], advice: str, late: int | None
) -> None:
    generator, own = np.random.default_rng(0), np.array(passes)[:, None]
    sizes = own * generator.integers(1000, 3000, (len(passes), 400)).astype(float)
    work = 10 + 20.0 * own + noise(generator, sizes.shape, "gaussian", 1.0)
    longest, every = [], 8 if options else 1
    for more in (0.0, 8.0):
        work[1] += more * (late == 1)
        longest.append((work + 3e-3 * sizes).reshape(len(passes), -1, every).mean(axis=2).max(axis=0).mean())
    table = replace(table_of(work, more_ms={"backward": 3e-3 * sizes}, every=every), elements=sizes)
    train = {"global_batch": sum(passes), "micro_batch": 1}
    found = analyse(run_of(table, config={"train": train, "parallel": options, "outer": options}))
    costs = longest[1] - longest[0]
    assert found.blame.late == ([1] if costs else []), "another rank with fewer is late, but nobody waits for it"
    assert found.blame.ranks[0].cost_ms.value == pytest.approx(costs, rel=0.1, abs=1.5)
    (division,) = _of(found, "division")
    assert division.cost_ms == pytest.approx(26.0 * float(np.mean(max(passes) - own)), rel=0.1)
    assert advice in division.advice
    assert options or late is not None or _of(found, "batch_sizes")
