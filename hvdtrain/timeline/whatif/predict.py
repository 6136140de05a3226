"""Predict how long a step would take after a change, and choose the compression that pays. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hvdtrain.timeline.analysis.ending import BETWEEN
from hvdtrain.timeline.analysis.stats import Z_975
from hvdtrain.timeline.whatif.assemble import AssembledStep, Costs, assemble_step, stretch_backward
from hvdtrain.timeline.whatif.engine_passes import engine_notes
from hvdtrain.timeline.whatif.evidence import Change, Evidence, Job, changed_job
from hvdtrain.timeline.whatif.fitting import link_between
from hvdtrain.timeline.whatif.links import Algorithm, Link, with_bandwidth
from hvdtrain.timeline.whatif.replay import Replayed, replay

_CODING_UNCERTAINTY = (0.5, 0.3)
"""Of the cost of coding, as a share: estimated, measured."""
_BANDWIDTH_UNCERTAINTY = 0.1
"""How much less than a given bandwidth a link may carry. Through a token bucket of 100 Mbit/s, allreduces of 8 MB got
0.95 of it with TCP's CUBIC, and 0.83 to 0.9 with BBR."""
_LATENCY_UNCERTAINTY = 0.5
"""Of the latency of a message, with more ranks than were measured."""
_JITTER_UNCERTAINTY = 0.5
_RESIDUAL_UNCERTAINTY = 0.3
_CROWDED_UNCERTAINTY = 0.2
"""Of a step, as a share, for twice as many threads on a core, or half as many."""
_ENGINE_UNCERTAINTY = 0.1
"""Of a step with another engine, as a share: what engines cost in addition to computing, exchange and copies."""
_MAX_STRETCH, _PRECISION = 64.0, 1e-7
"""How much faster early steps may have been than typical ones, and the precision to which that is found."""

WORTH = 0.95
"""A compression must bring the step below this share of the step without it: it costs accuracy and memory."""
_EQUAL = 1.03
"""Of the compressions within this factor of the fastest, the first one is chosen."""


@dataclass(frozen=True)
class Outcome:
    """A step; seconds."""

    step_s: float
    compute_s: float  # the training thread's own work
    exposed_s: float  # waiting for gradients, for parameters and for other ranks
    wire_s: float  # the exchange, hidden or exposed
    handed_bytes: float  # that a rank hands to collectives
    buckets: int
    replayed_wait_s: float  # the part of `exposed_s` that the replay explains
    gather_s: float = 0.0  # waiting for parameters of other ranks, and copying them


@dataclass(frozen=True)
class Prediction:
    """A predicted step; `low_s` and `high_s` are the 95% interval of `then.step_s`, if the model holds."""

    job: Job  # settings after the change
    now: Outcome  # the measured step, divided into parts by the model
    then: Outcome
    low_s: float
    high_s: float
    notes: Sequence[str]  # what the prediction is based on, and what it leaves out


def nothing_measured(*_: object) -> None:
    """`Costs` for a run without a coding probe."""


def predict(evidence: Evidence, change: Change, costs: Costs = nothing_measured) -> Prediction:
    """Replay the step as it was and as it would be.

    Errors: ConfigError: the change is invalid, or the run lacks a measurement that it needs.
    """
    job = changed_job(evidence, change)
    model = _Model(evidence, job, change, costs)
    now, then = model.outcomes()
    _, link_uncertainty, source = changed_link(evidence, job, change)
    extrapolated = job.ranks.size > evidence.job.ranks.size and change.latency_us is None
    swings = [
        evidence.step_uncertainty_s * then.step_s / now.step_s,
        Z_975 * BETWEEN * then.step_s,
        _CROWDED_UNCERTAINTY * abs(math.log2(evidence.crowding(job.ranks))) * then.step_s,
        model.swing(lambda error: replace(model, link_error=error), link_uncertainty),
        model.swing(lambda error: replace(model, latency_error=error), _LATENCY_UNCERTAINTY * extrapolated),
        model.swing(lambda error: replace(model, coding_error=error), _CODING_UNCERTAINTY[model.coding_measured]),
        _JITTER_UNCERTAINTY * abs(model.jitter_s),
        _ENGINE_UNCERTAINTY * then.step_s * (job.plan.engine_and_shard != evidence.job.plan.engine_and_shard),
        _RESIDUAL_UNCERTAINTY * abs(now.step_s - now.compute_s - now.replayed_wait_s) * (job != evidence.job),
    ]
    uncertainty_s = math.sqrt(math.fsum(swing**2 for swing in swings))
    low_s = max(then.step_s - uncertainty_s, 0.0)
    high_s = then.step_s + math.hypot(uncertainty_s, model.slower_algorithm_s(then.step_s))
    return Prediction(job, now, then, low_s, high_s, list(model.notes(source)))


def choose_compression(
    evidence: Evidence, candidates: Sequence[str], costs: Costs
) -> tuple[str, Mapping[str, Outcome]]:
    """Return the compression to train with, and the predicted step with each one, "none" first.

    The evidence is of steps without compression. Of the candidates, those that lose least come first.
    """
    predicted = {"none": _Model(evidence, evidence.job, Change(), costs).outcomes()[0]}
    for name in candidates:
        change = Change(compression=name)
        predicted[name] = _Model(evidence, changed_job(evidence, change), change, costs).outcomes()[1]
    best_s = min(outcome.step_s for outcome in predicted.values())
    if best_s > WORTH * evidence.step_s:
        return "none", predicted
    return next(name for name in candidates if predicted[name].step_s <= _EQUAL * best_s), predicted


def wait_and_wire(evidence: Evidence) -> tuple[float, float]:
    """Return the seconds of the measured step that the replay waits for gradients, and that the exchange takes."""
    model = _Model(evidence, evidence.job, Change(), nothing_measured)
    base = model.assemble(evidence.job, Change())
    found = replay(stretch_backward(base.step, model.stretch(base)))
    return found.wait_s, found.wire_s


def changed_link(evidence: Evidence, job: Job, change: Change) -> tuple[Link, float, str]:
    """Return the link between the ranks of a job after a change, its uncertainty as a share, and its source.

    Errors: ConfigError: nothing is known about it.
    """
    found = link_between(evidence, job, change.bandwidth_gbit)
    link, uncertainty = found.link, found.uncertainty
    assert link is not None
    if change.bandwidth_gbit is not None:
        link, uncertainty = with_bandwidth(link, change.bandwidth_gbit), _BANDWIDTH_UNCERTAINTY
    if change.latency_us is not None:
        link = replace(link, hop_s=change.latency_us * 1e-6)
    return replace(link, by_nccl=not evidence.on_cpu), uncertainty, found.source


@dataclass(frozen=True)
class _Model:
    evidence: Evidence
    job: Job
    change: Change
    costs: Costs
    link_error: float = 0.0
    latency_error: float = 0.0
    coding_error: float = 0.0

    def outcomes(self) -> tuple[Outcome, Outcome]:
        """Return the step as it was and as it would be."""
        now, then = self.assemble(self.evidence.job, Change()), self.assemble(self.job, self.change)
        stretch = self.stretch(now)
        base, changed = (replay(stretch_backward(assembled.step, stretch)) for assembled in (now, then))
        added_s = self.residual_s(base, changed) + self.jitter_s
        return _outcome(now, base, self.evidence.step_s - base.step_s), _outcome(then, changed, added_s)

    def residual_s(self, base: Replayed, changed: Replayed) -> float:
        """Return the part of the measured step that the replay does not explain, as it is after the change.

        It stays the same if the measured step is longer. If it is shorter, because less was waited for, it shrinks in
        proportion to the wait. A rank that trains alone does not wait for others. Ranks that load for a given time do
        not wait for the one that loads longest.
        """
        residual_s = self.evidence.step_s - base.step_s
        if self.job.ranks.size == 1 < self.evidence.job.ranks.size:
            return 0.0
        if residual_s < 0:
            return residual_s * min(1.0, _waited_s(changed) / max(_waited_s(base), -residual_s))
        if self.change.data_ms is not None:
            residual_s -= min(residual_s, self.evidence.late_by_data_s)
        return residual_s

    @property
    def jitter_s(self) -> float:
        """The change of the time that a rank waits for the slowest rank."""
        jitter, was = self.evidence.jitter, self.evidence.job.ranks.size
        work = self.job.passes / self.evidence.job.passes
        added_s = jitter.expected_maximum_s(self.job.ranks.size) * work - jitter.expected_maximum_s(was)
        return added_s if self.job.ranks.size > 1 else 0.0

    @property
    def coding_measured(self) -> bool:
        """Whether no cost of coding is an estimate."""
        return self.assemble(self.job, self.change).coding_measured

    def slower_algorithm_s(self, step_s: float) -> float:
        """Return by how much more than `step_s` a step may take: more ranks than measured may use another algorithm."""
        if self.change.algorithm not in (None, "auto") or self.job.ranks.size <= self.evidence.job.ranks.size:
            return 0.0
        names: tuple[Algorithm, ...] = ("ring", "tree") if self.evidence.on_cpu else ("ring", "double_tree")
        others = [replace(self, change=replace(self.change, algorithm=n)).outcomes()[1].step_s for n in names]
        return max(0.0, max(others) - step_s)

    def swing(self, with_error: Callable[[float], _Model], error: float) -> float:
        """Return how much an error in one number changes the prediction."""
        up, down = (with_error(sign * error).outcomes()[1].step_s for sign in (1.0, -1.0))
        return abs(up - down) / 2

    def notes(self, source: str) -> Iterator[str]:
        """Yield what the prediction is based on; `source` is that of the link."""
        evidence, size = self.evidence, self.job.ranks.size
        yield from evidence.notes
        if size > 1:
            yield f"link: {source}"
        if not self.coding_measured and (size > 1 or self.job.plan.compression != "none"):
            yield "cost of coding: estimated from another machine; --probe measures it on this one"
        yield from engine_notes(evidence, self.job)
        if (dimensions := self.job.plan.dimensions).same_samples > 1 or dimensions.ep > 1:
            yield "computing includes the exchange of activations; a pass is assumed to take as long as it did"
        if dimensions.pp > 1:
            yield f"stages are assumed to wait as long as {dimensions.pp - 1} pass(es) of a step take"
            yield "gradients of other stages than the first one are not in the model"
            if self.job.ranks.hosts > 1 and (self.change.changes_link or evidence.job.ranks.hosts == 1):
                yield "stages on several hosts exchange activations by another link than in the run: not in the model"
        if size > 1 and not evidence.jitter.reaches(size):
            measured = len(evidence.jitter.deviations)
            yield f"extrapolated: the delay of the slowest of {size} ranks, from {measured} measured rank-steps"
        if size > 4 * evidence.job.ranks.size:
            ranks = f"from {evidence.job.ranks.size} to {size} ranks"
            yield f"extrapolated: {ranks}; the model has no switches and no traffic of other jobs"
        idle = self.job.places - self.job.micro_batches
        if idle > 0:
            yield (
                f"{idle} of {self.job.places} ranks would be idle: a global batch of {self.job.global_batch} has"
                f" {self.job.micro_batches} micro-batch(es); to keep the work per rank: --global_batch"
                f" {self.job.micro_batch * evidence.job.passes * self.job.places}"
            )
        if size > evidence.job.ranks.size and self.job.ranks.per_host > evidence.job.ranks.per_host:
            yield (
                "more ranks on a host than were measured: the model leaves out that they share memory bandwidth and"
                " caches"
            )

    def assemble(self, job: Job, change: Change) -> AssembledStep:
        """Return the step of a job after a change."""
        link, _, _ = changed_link(self.evidence, job, change)
        hop_s, s_per_byte = link.hop_s * (1 + self.latency_error), link.s_per_byte * (1 + self.link_error)
        link = replace(link, hop_s=hop_s, s_per_byte=s_per_byte)
        return assemble_step(self.evidence, job, change, link, self.costs, 1 + self.coding_error)

    def stretch(self, base: AssembledStep) -> float:
        """Return the factor on the time between gradients with which the replayed backward takes the measured time."""
        measured_s = self.evidence.parts_s["backward"] / self.evidence.job.passes
        low, high = 0.0, _MAX_STRETCH
        while high - low > _PRECISION * high:
            middle = (low + high) / 2
            shorter = replay(stretch_backward(base.step, middle)).backward_s < measured_s
            low, high = (middle, high) if shorter else (low, middle)
        return (low + high) / 2


def _waited_s(replayed: Replayed) -> float:
    """Return the part of a step that is not the training thread's own work."""
    return replayed.step_s - replayed.compute_s


def _outcome(assembled: AssembledStep, replayed: Replayed, added_s: float) -> Outcome:
    return Outcome(
        replayed.step_s + added_s,
        replayed.compute_s,
        max(0.0, replayed.step_s + added_s - replayed.compute_s),
        replayed.wire_s,
        assembled.payload_bytes,
        len(assembled.buckets),
        _waited_s(replayed),
        replayed.gather_s,
    )
