"""How long a step would take, were one thing or another different. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hvdtrain.timeline.whatif.assemble import Assembled, Costs, Setting, assemble, stretched
from hvdtrain.timeline.whatif.change import Change, changed_job
from hvdtrain.timeline.whatif.evidence import Evidence, Job
from hvdtrain.timeline.whatif.fitting import known_link
from hvdtrain.timeline.whatif.links import Link, of_bandwidth
from hvdtrain.timeline.whatif.replay import Replayed, replay

_CODING_OFF = (0.5, 0.3)
"""By how much costs of coding may be off: estimated, measured."""
_ASKED_OFF = 0.1
"""By how much a link may carry less than the bandwidth that was asked for: through a token bucket of 100 Mbit/s
allreduces of 8 MB got 0.95 of it by TCP's CUBIC, by BBR 0.83 to 0.9."""
_JITTER_OFF = 0.5
_RESIDUAL_OFF = 0.3
_MOST_STRETCHED, _CLOSE = 64.0, 1e-7
"""What early steps may have been faster than typical ones, and to what share it is found."""


@dataclass(frozen=True)
class Outcome:
    """A step, in seconds.

    Attributes:
        step_s: all of it.
        compute_s: the training thread's own work.
        exposed_s: waiting for gradients, and for other ranks.
        wire_s: the exchange, hidden or not.
        handed_bytes: that a rank hands to collectives.
        buckets: how many.
        replayed_wait_s: of `exposed_s`, what the replay has; the rest is what it does not explain.
    """

    step_s: float
    compute_s: float
    exposed_s: float
    wire_s: float
    handed_bytes: float
    buckets: int
    replayed_wait_s: float


@dataclass(frozen=True)
class Prediction:
    """What is predicted, and how sure that is.

    Attributes:
        job: how it would be made.
        now: as measured, its parts as the model has them.
        then: with the change.
        low_s, high_s: where `then.step_s` lies in 19 of 20 cases, if the model holds.
        notes: on what it rests, and what it leaves out.
    """

    job: Job
    now: Outcome
    then: Outcome
    low_s: float
    high_s: float
    notes: Sequence[str]


def nothing_measured(*_: object) -> None:
    """Stands for `Costs` where no probe was made."""


def predict(evidence: Evidence, change: Change, costs: Costs = nothing_measured) -> Prediction:
    """Replay the step as it was and as it would be.

    Errors:
        ConfigError: the change is none that can be, or nothing is known of what it needs.
    """
    job = changed_job(evidence, change)
    model = _Model(evidence, job, change, costs)
    now, then = model.outcomes()
    swings = [
        evidence.off_s * max(1.0, then.compute_s / max(now.compute_s, 1e-9)),
        model.swing(lambda off: replace(model, link_off=off), model.link_uncertainty),
        model.swing(lambda off: replace(model, coding_off=off), _CODING_OFF[model.coding_is_measured]),
        _JITTER_OFF * abs(model.jitter_s),
        _RESIDUAL_OFF * abs(now.step_s - now.compute_s - now.replayed_wait_s) * (job != evidence.job),
    ]
    off_s = math.sqrt(math.fsum(swing**2 for swing in swings))
    low_s = max(then.step_s - off_s, 0.0)
    return Prediction(job, now, then, low_s, then.step_s + off_s, model.notes())


def wait_and_wire(evidence: Evidence) -> tuple[float, float]:
    """What of a step as it was is waited for, and on the way."""
    model = _Model(evidence, evidence.job, Change(), nothing_measured)
    base = assemble(evidence, model._was(), nothing_measured)
    found = replay(stretched(base.step, model._stretch(base)))
    return found.wait_s, found.wire_s


@dataclass(frozen=True)
class _Model:
    evidence: Evidence
    job: Job
    change: Change
    costs: Costs
    link_off: float = 0.0
    coding_off: float = 0.0

    def outcomes(self) -> tuple[Outcome, Outcome]:
        """As it was, and as it would be."""
        now, then = (assemble(self.evidence, setting, self.costs) for setting in (self._was(), self._would_be()))
        stretch = self._stretch(now)
        base, changed = (replay(stretched(assembled.step, stretch)) for assembled in (now, then))
        added_s = self.residual_s(base, changed) + self.jitter_s
        return _outcome(now, base, self.evidence.step_s - base.step_s), _outcome(then, changed, added_s)

    def residual_s(self, base: Replayed, changed: Replayed) -> float:
        """What the measured step has more or less than the replayed one, of which it stays.

        What is replayed as waited for and was not shrinks with what is waited for; waiting for others ends where there
        are none.
        """
        residual_s = self.evidence.step_s - base.step_s
        if self.job.ranks.size == 1 < self.evidence.job.ranks.size:
            return 0.0
        if residual_s < 0:
            return residual_s * min(1.0, _waited_s(changed) / max(_waited_s(base), -residual_s))
        return residual_s

    @property
    def jitter_s(self) -> float:
        """What waiting for the slowest of other ranks adds."""
        jitter, was = self.evidence.jitter, self.evidence.job.ranks.size
        work = self.job.passes / self.evidence.job.passes
        added_s = jitter.expected_maximum_s(self.job.ranks.size) * work - jitter.expected_maximum_s(was)
        return added_s if self.job.ranks.size > 1 else 0.0

    @property
    def coding_is_measured(self) -> bool:
        """Whether nothing of coding was estimated."""
        return assemble(self.evidence, self._would_be(), self.costs).measured

    @property
    def link_uncertainty(self) -> float:
        """By how much the link's speed may be off."""
        return _ASKED_OFF if self.change.bandwidth_gbit is not None else self._known()[1]

    def swing(self, other: Callable[[float], _Model], off: float) -> float:
        """By how much the prediction changes where a number is off by so much."""
        up, down = (other(sign * off).outcomes()[1].step_s for sign in (1.0, -1.0))
        return abs(up - down) / 2

    def notes(self) -> list[str]:
        """On what this rests."""
        evidence, size = self.evidence, self.job.ranks.size
        found = list(evidence.notes)
        if size > 1:
            found.append(f"link: {self._known()[2]}")
        if not self.coding_is_measured and (size > 1 or self.job.compression != "none"):
            found.append("cost of coding: by a table of another machine; --probe measures it here")
        if size > 1 and not evidence.jitter.reaches(size):
            seen = len(evidence.jitter.deviations)
            found.append(f"extrapolated: how late the slowest of {size} ranks is, from {seen} measured steps of ranks")
        if size > 4 * evidence.job.ranks.size:
            found.append(
                f"extrapolated: from {evidence.job.ranks.size} to {size} ranks; switches and what others send through"
                " them are not in the model"
            )
        idle = size - self.job.micro_batches
        if idle > 0:
            found.append(
                f"{idle} of {size} ranks would have nothing to do: a global batch of {self.job.global_batch} has"
                f" {self.job.micro_batches} micro-batch(es); for as many a rank as now: --global_batch"
                f" {self.job.micro_batch * evidence.job.passes * size}"
            )
        if size > evidence.job.ranks.size and self.job.ranks.per_host > evidence.job.ranks.per_host:
            found.append(
                "more ranks on a host than were measured: what they take from each other of its memory's and"
                " caches' speed is not in the model"
            )
        return found

    def _was(self) -> Setting:
        link = self.evidence.fitted.link or Link(0.0, 0.0)
        return Setting(
            self.evidence.job,
            replace(link, s_per_byte=link.s_per_byte * (1 + self.link_off)),
            full=self.evidence.cores_are_full(self.evidence.job.ranks),
            coding=1 + self.coding_off,
        )

    def _would_be(self) -> Setting:
        evidence, change, job = self.evidence, self.change, self.job
        link, *_ = self._known()
        if change.bandwidth_gbit is not None:
            link = of_bandwidth(link, change.bandwidth_gbit)
        if change.latency_us is not None:
            link = replace(link, hop_s=change.latency_us * 1e-6)
        return Setting(
            job,
            replace(link, s_per_byte=link.s_per_byte * (1 + self.link_off)),
            change.algorithm or "auto",
            evidence.cores_are_full(job.ranks),
            None if change.data_ms is None else change.data_ms / 1e3,
            1 + (change.slow_rank_percent or 0.0) / 100,
            1 + self.coding_off,
        )

    def _known(self) -> tuple[Link, float, str]:
        return known_link(self.evidence, self.job.ranks, self.change.bandwidth_gbit)

    def _stretch(self, base: Assembled) -> float:
        """What times between gradients have to be multiplied by for backward to take what it took."""
        measured_s = self.evidence.parts_s["backward"] / self.evidence.job.passes
        low, high = 0.0, _MOST_STRETCHED
        while high - low > _CLOSE * high:
            middle = (low + high) / 2
            shorter = replay(stretched(base.step, middle)).backward_s < measured_s
            low, high = (middle, high) if shorter else (low, middle)
        return (low + high) / 2


def _waited_s(replayed: Replayed) -> float:
    """What of a step is not the training thread's own work."""
    return replayed.step_s - replayed.compute_s


def _outcome(assembled: Assembled, replayed: Replayed, added_s: float) -> Outcome:
    return Outcome(
        replayed.step_s + added_s,
        replayed.compute_s,
        max(0.0, replayed.step_s + added_s - replayed.compute_s),
        replayed.wire_s,
        assembled.handed_bytes,
        len(assembled.buckets),
        _waited_s(replayed),
    )
