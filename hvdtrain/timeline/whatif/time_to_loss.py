"""Compare ways to exchange by the time to one loss: of predicted steps and measured numbers of samples. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hvdtrain.config.sync import AUTO_SYNC
from hvdtrain.errors import ConfigError
from hvdtrain.timeline.whatif.assemble import Costs
from hvdtrain.timeline.whatif.evidence import Change, Evidence, changed_job
from hvdtrain.timeline.whatif.outer_exchange import RarePrediction, predict_rarely
from hvdtrain.timeline.whatif.predict import nothing_measured


@dataclass(frozen=True)
class Measured:
    """Samples that training apart needs until a loss, over those with an exchange in each step.

    Attributes:
        options: further ones that it was measured with.
        samples, low, high: median, least and most of three seeds.
    """

    sync: str
    coding: str
    options: str
    samples: float
    low: float
    high: float


_BEGIN = "--outer.start_steps 100"
_OUTER = f"--outer.lr 0.8 --outer.momentum 0.5 {_BEGIN}"
MEASURED = (
    Measured("diloco:8", "int2", _OUTER, 1.07, 1.06, 1.12),
    Measured("streaming:8", "int2", _OUTER, 1.07, 1.06, 1.13),
    Measured("streaming:32", "int2", _OUTER, 1.12, 1.11, 1.14),
    Measured("local:8", "int4", _BEGIN, 1.04, 1.01, 1.05),
    Measured("sparseloco:8", "topk:0.03", _BEGIN, 1.10, 1.06, 1.12),
)
"""By ``benchmarks/slow_links.py``: the default model, 2 workers of 8 samples, until the loss that the synchronous run
has after 400 of 1,000 steps. The first 100 steps were synchronous."""
_START = 0.25
"""Synchronous steps at the beginning, over the steps of the synchronous run until that loss."""
_NOTE = (
    "samples were measured with a small language model and 2 workers of 8 samples: larger models and batches need fewer"
    " (docs/slow-links.md)"
)


@dataclass(frozen=True)
class Way:
    """A way to exchange, and the time that it takes to a loss; seconds and bytes.

    Attributes:
        samples: to the loss, over those with an exchange in each step.
            low_s, time_s, high_s: time to the loss, for each step that a run takes which exchanges in each.
    """

    name: str  # in short
    options: str  # of `hvdtrain train`
    step_s: float  # the predicted step
    samples: float
    low_s: float
    time_s: float
    high_s: float


@dataclass(frozen=True)
class Comparison:
    """Ways to exchange."""

    workers: int
    ways: Sequence[Way]  # the fastest first
    usual: Way  # the fastest with an exchange in each step
    best: Way  # to be used: the fastest with its whole interval below `usual`, or else `usual`
    notes: Sequence[str]  # what the comparison is based on


def compare_ways(evidence: Evidence, change: Change, costs: Costs = nothing_measured) -> Comparison:
    """Compare an exchange in each step and the measured ways to train apart, with the other changes of `change`.

    Errors: ConfigError: there is one rank, the change is invalid, or the run lacks a measurement that is needed.
    """
    asked = replace(change, sync=None, workers=None, outer_compression=None)
    ranks = changed_job(evidence, asked).ranks
    workers = change.workers or (ranks.hosts if ranks.hosts > 1 else ranks.size)
    if workers < 2:
        raise ConfigError(f"--sync {AUTO_SYNC} compares exchanges, but there is one rank", next_step="add --size 2")
    found = []
    for way in MEASURED:
        apart = replace(asked, sync=way.sync, workers=workers, outer_compression=way.coding)
        found.append((way, predict_rarely(evidence, apart, costs)))
    last = found[-1][1]
    each_step = [
        Way(f"in each step, {name}", f"--parallel.compression {name}", s, 1.0, s, s, s)
        for name, s in last.synchronous_s.items()
    ]
    usual = min(each_step, key=lambda way: way.time_s)
    ways = sorted([*each_step, *(_way(*each, usual.step_s) for each in found)], key=lambda way: way.time_s)
    best = next((way for way in ways if way.high_s < usual.time_s), usual)
    return Comparison(workers, ways, usual, best, [*last.notes, _NOTE])


def _way(way: Measured, found: RarePrediction, start_s: float) -> Way:
    """Return the time with `way`; its synchronous steps at the beginning take `start_s` each."""

    def time_s(step_s: float, samples: float) -> float:
        return _START * start_s + (samples - _START) * step_s

    workers = found.plan.workers
    options = f"--parallel.sync {way.sync} --parallel.workers {workers} --outer.compression {way.coding} {way.options}"
    return Way(
        f"{way.sync}, {way.coding}",
        options.strip(),
        found.step_s,
        way.samples,
        time_s(found.low_s, way.low),
        time_s(found.step_s, way.samples),
        time_s(found.high_s, way.high),
    )
