"""What a prediction is based on: the measurements of a run, the settings of its job, and a change of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.compression.table import Compression, parse
from hvdtrain.config.schema import Config, ParallelConfig
from hvdtrain.errors import ConfigError
from hvdtrain.plan.collectives import PlannedBucket, buckets, lay_out
from hvdtrain.plan.gradients import Gradient
from hvdtrain.plan.plan import Plan, Ranks
from hvdtrain.plan.refusals import resolve
from hvdtrain.spans import JOURNAL_KEYS
from hvdtrain.timeline.whatif.links import Algorithm, Link

_TAIL = 0.1
"""Share of the deviations that the tail is fitted to."""
_WINDOW = 9
"""Steps. Their median is the part of a deviation that lasts."""
_EULER = 0.5772156649
_MIN_FOR_TAIL = 20
"""Deviations below which no tail is fitted."""


@dataclass(frozen=True)
class Jitter:
    """The deviations of a rank's computing time from its mean: seconds, ascending, of all ranks and steps."""

    deviations: NDArray[np.float64]

    @classmethod
    def from_times(cls, compute_s: NDArray[np.float64]) -> Jitter:
        """Return the jitter of computing times [ranks, steps].

        A deviation that all ranks share makes no rank wait, so it is removed. If there is one rank, the median of the
        steps around a step takes its place.
        """
        if compute_s.size == 0:
            return cls(np.zeros(1))
        kept = np.atleast_2d(compute_s)
        if kept.shape[0] == 1:
            padded = np.pad(kept[0], _WINDOW // 2, mode="reflect" if kept.size > _WINDOW else "edge")
            kept = kept - np.median(np.lib.stride_tricks.sliding_window_view(padded, _WINDOW), axis=1)
        else:
            ranks = kept.shape[0]
            # The mean over n ranks holds 1/n of a rank's own deviation; the factor restores it.
            kept = (kept - kept.mean(axis=0)) * math.sqrt(ranks / (ranks - 1))
        kept = kept - kept.mean(axis=1, keepdims=True)
        return cls(np.sort(kept.ravel()))

    def expected_maximum_s(self, ranks: int) -> float:
        """Return how much later than an average rank the slowest of `ranks` is, in seconds."""
        m = len(self.deviations)
        if ranks <= 1 or m < 2:
            return 0.0
        # E[max of n] of the empirical distribution: sum of x_(i) ((i/m)^n - ((i-1)/m)^n).
        steps = (np.arange(m + 1) / m) ** ranks
        measured = float(self.deviations @ np.diff(steps))
        return max(measured, self._tail_s(ranks))

    def reaches(self, ranks: int) -> bool:
        """Whether there are as many deviations as ranks. If not, the tail is extrapolated."""
        return ranks <= len(self.deviations)

    def _tail_s(self, ranks: int) -> float:
        """Return the expected maximum of an exponential tail above the 90th percentile: u + b (ln(p n) + gamma).

        Pickands, 1975, with shape 0.
        """
        m = len(self.deviations)
        if m < _MIN_FOR_TAIL or self.reaches(ranks):
            return 0.0
        threshold = float(np.quantile(self.deviations, 1 - _TAIL))
        above = self.deviations[self.deviations > threshold] - threshold
        if not len(above):
            return 0.0
        return threshold + float(above.mean()) * (math.log(ranks * _TAIL) + _EULER)


_SHARED_CORES = 1.2
"""4 ranks on 2 cores took 2.2 to 2.5 times as long as 2: threads also share caches, and wait for their turn."""


@dataclass(frozen=True)
class Job:
    """The settings of a job that a prediction may change: its plan, and numbers of samples."""

    ranks: Ranks
    plan: Plan
    global_batch: int
    micro_batch: int
    of_rank_0: float = 1.0
    """Micro-batches of rank 0, which is measured, over those of an equal share: not 1 if they follow speed."""

    @property
    def sharers(self) -> int:
        """Number of ranks that divide the update among them."""
        return 1 if self.plan.shard == "none" else self.ranks.size

    @property
    def passes(self) -> int:
        """Forward passes per step of the rank with the most micro-batches; of rank 0 if they follow speed."""
        if self.of_rank_0 != 1.0:
            return max(1, round(self.of_rank_0 * self.micro_batches / self.places))
        return -(-self.micro_batches // self.places)

    @property
    def places(self) -> int:
        """Number of ranks, or groups of ranks, with their own samples."""
        return self.ranks.size // self.plan.dimensions.same_samples

    @property
    def pass_times(self) -> float:
        """Duration of the passes of a step, in times of a pass: stages of a pipeline wait at its begin and end."""
        return self.passes / (1 - self.plan.dimensions.bubble(self.ranks.size, self.micro_batches))

    @property
    def groups_span_hosts(self) -> bool:
        """Whether ranks that divide matrices, sequences or experts are on several hosts."""
        dimensions = self.plan.dimensions
        width = math.lcm(dimensions.tp * dimensions.cp, dimensions.experts)
        return self.ranks.hosts > 1 and self.ranks.per_host % width > 0

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step over all ranks."""
        return -(-self.global_batch // self.micro_batch)


@dataclass(frozen=True)
class FittedLink:
    """A link (None if nothing was exchanged), what it was derived from, and the uncertainty of its speed as a share."""

    link: Link | None
    source: str
    uncertainty: float


@dataclass(frozen=True)
class Evidence:
    """The measurements of a run. Seconds are medians over steps; `jitter` is how much computing differs by step."""

    job: Job
    cores: int  # cores of rank 0's host
    own_cores: int  # cores that rank 0 may use; fewer than `cores` if its launcher bound it
    threads: int  # that each rank computes with
    on_cpu: bool  # whether the model computes on the CPU
    gradients: Sequence[Gradient]  # in the model's order
    step_s: float  # duration of a step
    parts_s: Mapping[str, float]  # duration of each of `spans.JOURNAL_KEYS`, and "rest" for everything else, on rank 0
    path: Path = Path()
    tail_s: float = 0.0  # backward after the last gradient
    step_uncertainty_s: float = 0.0  # 95% interval of `step_s` from the spread of steps
    jitter: Jitter = field(default_factory=lambda: Jitter(np.zeros(1)))
    fitted: FittedLink = FittedLink(None, "nothing was exchanged", 0.0)  # the link
    late_s: float = 0.0  # how much later than rank 0 the slowest rank is ready, if all ranks recorded it
    late_by_data_s: float = 0.0  # the part of it because ranks wait unequally long for data
    copy_s_per_byte: float | None = None  # to pack a gradient uncompressed; None if not measured
    buckets: Sequence[Sequence[str]] = ()  # names of the gradients in each, if they stay as they are; else empty
    compression_of: Callable[[str], Compression] = parse  # what the name of a compression means in this job
    notes: Sequence[str] = ()  # what is missing

    def cores_are_full(self, ranks: Ranks) -> bool:
        """Whether the thread that exchanges has no core of its own while the rank computes."""
        bound = self.own_cores < self.cores and self.threads >= self.own_cores
        return self.on_cpu and (bound or ranks.per_host * self.threads >= self.cores)

    def crowding(self, ranks: Ranks) -> float:
        """Return the time of computing over that in the run, because more or fewer threads share a core."""
        if not self.on_cpu or self.own_cores < self.cores:
            return 1.0
        then, now = (max(1.0, each.per_host * self.threads / self.cores) for each in (ranks, self.job.ranks))
        return math.pow(then / now, _SHARED_CORES)

    def buckets_of(self, job: Job) -> list[PlannedBucket]:
        """Return the buckets that a job would have, of what several ranks sum."""
        if self.buckets:
            by_name = {gradient.name: gradient for gradient in self.gradients}
            return [lay_out([by_name[name] for name in names]) for names in self.buckets]
        work = job.passes / self.job.passes  # rows were counted on the ranks of the run
        gradients = [replace(g, rows=g.rows and math.ceil(g.rows * work)) for g in self.gradients]
        return buckets(job.plan, gradients, job.ranks, self.compression_of(job.plan.compression))


def read_parts(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the parts of a step from its line in the journal, and the whole as "step"; seconds.

    The exchange of activations stays as it is, so it counts as a part of forward.
    """
    parts = {part: record.get(key, 0.0) for part, key in JOURNAL_KEYS.items()}
    forward_s = parts["forward"] + parts["activations"]
    return {**parts, "forward": forward_s, "activations": 0.0, "step": record["step_s"]}


def median_parts(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each part over the steps that `read_parts` returned, and what they leave as "rest"."""
    parts = {name: median(step[name] for step in steps) for name in JOURNAL_KEYS}
    return {**parts, "rest": max(0.0, median(step["step"] for step in steps) - sum(parts.values()))}


@dataclass(frozen=True)
class Change:
    """The settings to change; None keeps a setting. They are the options of `hvdtrain timeline whatif`."""

    size: int | None = None
    ranks_per_host: int | None = None
    bandwidth_gbit: float | None = None
    latency_us: float | None = None
    algorithm: Algorithm | None = None
    compression: str | None = None
    bucket_mib: float | None = None
    global_batch: int | None = None
    data_ms: float | None = None
    slow_rank_percent: float | None = None
    shard: str | None = None
    engine: str | None = None
    sync: str | None = None
    workers: int | None = None
    outer_compression: str | None = None

    @property
    def changes_link(self) -> bool:
        """Whether messages take other times."""
        return self.bandwidth_gbit is not None or self.latency_us is not None


def changed_job(evidence: Evidence, change: Change) -> Job:
    """Return the job after the change.

    Errors: ConfigError: a number is out of range, the options do not go together, or the model does not know them.
    """
    was = evidence.job
    _check_ranges(change)
    size = change.size or was.ranks.size
    fitting = max(was.ranks.per_host, evidence.cores // max(1, evidence.threads))
    per_host = change.ranks_per_host or (was.ranks.per_host if was.ranks.hosts > 1 else fitting)
    compression = was.plan.compression if change.compression is None else str(parse(change.compression))
    engine = change.engine or was.plan.engine
    shard = change.shard or (was.plan.shard if engine == was.plan.engine else "none")
    bucket_mib = was.plan.bucket_mib if change.bucket_mib is None else change.bucket_mib
    plan = replace(was.plan, engine=engine, shard=shard, compression=compression, bucket_mib=bucket_mib)
    job = Job(Ranks(size, min(per_host, size)), plan, change.global_batch or was.global_batch, was.micro_batch)
    if plan.dimensions:
        _check_mesh(was, job, change)
    asked: dict[str, Any] = {"engine": engine, "shard": shard, "compression": compression, **vars(plan.dimensions)}
    job = replace(job, plan=replace(plan, shard=resolve(Config(parallel=ParallelConfig(**asked))).shard))
    _check_engine(job)
    if engine == "fsdp" and any(gradient.whole for gradient in evidence.gradients):
        raise ConfigError(
            "--engine fsdp gives each rank rows of tensors, but the run's optimizer may need whole tensors",
            next_step="--engine horovod --shard optimizer",
        )
    return job


def _check_mesh(was: Job, job: Job, change: Change) -> None:
    dimensions = job.plan.dimensions
    dimensions.check(job.ranks.size)
    dimensions.check_passes(job.ranks.size, job.micro_batches)
    spans_hosts = was.groups_span_hosts or job.groups_span_hosts
    what = ""
    if change.sync is not None or job.plan.engine_and_shard != was.plan.engine_and_shard:
        what = "another engine, shard or sync cannot be predicted"
    elif spans_hosts and (was.ranks.per_host != job.ranks.per_host or change.changes_link):
        what = "the exchange of activations between hosts cannot be predicted"
    if what:
        raise ConfigError(
            f"{what} with {dimensions.options}",
            expected="another number of such groups of ranks, global batch, compression or buckets; the same"
            " --ranks_per_host, or a multiple of these groups",
            found=f"{job.ranks.per_host} rank(s) on a host",
            next_step="measure the change, and compare both runs: hvdtrain compare",
        )


def _check_engine(job: Job) -> None:
    engine, shard = job.plan.engine_and_shard
    options = f"--engine {engine} --shard {shard}"
    if shard != "none" and job.ranks.size == 1:
        raise ConfigError(
            f"{options} divides the update among ranks, but there is one rank",
            expected="2 or more ranks",
            next_step="--size 2, or --engine horovod --shard none",
        )
    if shard != "none" and job.plan.compression != "none":
        raise ConfigError(
            f"{options} cannot be predicted with compression {job.plan.compression}",
            expected="--compression none",
            next_step="--compression none, or --engine horovod --shard none",
        )


def _check_ranges(change: Change) -> None:
    above_zero = ("size", "ranks_per_host", "bandwidth_gbit", "bucket_mib", "global_batch")
    for name in (*above_zero, "latency_us", "data_ms", "slow_rank_percent"):
        value = getattr(change, name)
        if value is not None and (not math.isfinite(value) or value < 0 or (name in above_zero and value == 0)):
            expected = "a number > 0" if name in above_zero else "a number >= 0"
            raise ConfigError(f"--{name} is out of range", expected=expected, found=str(value))
