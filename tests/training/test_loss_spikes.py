"""Jumps of a loss: reported once, and none where there is only noise."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.training.diagnostics.step_checks import KEEP, Series


def _told(losses: list[float]) -> list[int]:
    found = [Series(losses[max(0, t - KEEP) : t]).jump(loss) for t, loss in enumerate(losses)]
    series = Series()
    for expected, loss in zip(found, losses, strict=True):
        assert series.jump(loss) == expected
        series.add(loss)
    assert vars(series) == vars(Series(series.values)), "kept as it would be made"
    return [t for t, expected in enumerate(found) if expected is not None]


def _walk(rng: random.Random, steps: int, size: float) -> list[float]:
    at, path = 0.0, []
    for _ in range(steps):
        at += rng.gauss(0, size)
        path.append(at)
    return path


NOISE: dict[str, Callable[[random.Random, int], list[float]]] = {
    "level": lambda rng, n: [3 + rng.gauss(0, 0.05) for _ in range(n)],
    "falling": lambda rng, n: [1 + 9 * math.exp(-t / 200) + rng.gauss(0, 0.05) for t in range(n)],
    "smooth": lambda rng, n: [9 * math.exp(-t / 200) for t in range(n)],
    "a sample a step": lambda rng, n: [rng.expovariate(1) for _ in range(n)],
    "by orders of magnitude": lambda rng, n: [math.exp(rng.gauss(0, 1)) for _ in range(n)],
    "waves": lambda rng, n: [3 + 0.3 * math.sin(t / 20) + rng.gauss(0, 0.02) for t in range(n)],
    "walk": lambda rng, n: [10 + x for x in _walk(rng, n, 0.01)],
    "around zero": lambda rng, n: [rng.gauss(0, 1) for _ in range(n)],
}


@pytest.mark.parametrize("kind", NOISE)
@given(seed=st.integers(0, 10**6))
@settings(max_examples=5, derandomize=True)
def test_noise_is_no_spike(kind: str, seed: int) -> None:
    assert _told(NOISE[kind](random.Random(seed), 1000)) == []


@given(seed=st.integers(0, 10**6), at=st.integers(24, 199), length=st.integers(1, 60), factor=st.floats(1.3, 100))
@settings(max_examples=30, derandomize=True)
def test_a_long_spike_is_reported_once(seed: int, at: int, length: int, factor: float) -> None:
    losses = NOISE["level"](random.Random(seed), 300)
    for t in range(at, at + length):
        losses[t] *= factor
    assert [t for t in _told(losses) if t < at + length] == [at]
    expected = Series(losses[max(0, at - KEEP) : at]).jump(losses[at])
    assert expected == pytest.approx(3, abs=0.1)


JUMPS = [9.0 if t in (50, 53, 120) else loss for t, loss in enumerate(NOISE["level"](random.Random(0), 200))]


@pytest.mark.parametrize(
    ("losses", "spikes"),
    [
        *(([unit * loss for loss in JUMPS], [50, 120]) for unit in (1e-9, 1.0, 1e9)),
        ([1.0] * 23 + [1e9], []),  # too few losses to tell
        ([1.0] * 24 + [1e9], [24]),
        *(([level] * 100 + [level + 0.07] + [level] * 50 + [level + 0.09], [151]) for level in (1.0, -1.0)),
    ],
)
def test_spikes(losses: list[float], spikes: list[int]) -> None:
    """In any unit, again after a while, and not each change of a curve without noise."""
    assert _told(losses) == spikes
