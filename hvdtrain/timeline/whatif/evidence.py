"""What a prediction is based on: the measurements of a run, the settings of its job, and a change of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from hvdtrain.comm.dimensions import ONE, Dimensions
from hvdtrain.compression.table import Compression, parse
from hvdtrain.errors import ConfigError
from hvdtrain.spans import JOURNAL_KEYS
from hvdtrain.timeline.whatif.bucket_plan import Gradient, PlannedBucket
from hvdtrain.timeline.whatif.jitter import Jitter
from hvdtrain.timeline.whatif.links import Algorithm, Link, Ranks

ENGINES = {"horovod": ("none", "optimizer", "gradients"), "ddp": ("none",), "fsdp": ("none", "parameters")}
"""Values of `--parallel.shard` by engine that the model knows."""


@dataclass(frozen=True)
class Job:
    """The settings of a job that a prediction may change.

    Attributes:
        bucket_mib: as in options; None for the default of the compression.
        global_batch, micro_batch: samples.
        engine, shard: as in options.
        dimensions: numbers of ranks that divide the model or sequences.
    """

    ranks: Ranks
    compression: str
    bucket_mib: float | None
    global_batch: int
    micro_batch: int
    engine: str = "horovod"
    shard: str = "none"
    dimensions: Dimensions = ONE

    @property
    def is_divided(self) -> bool:
        """Whether each rank updates only its part of the parameters."""
        return self.engine == "fsdp" or self.shard != "none"

    @property
    def sums_each_pass(self) -> bool:
        """Whether gradients are exchanged in each pass, so that a rank never holds all of them."""
        return self.engine == "fsdp" or self.shard == "gradients"

    @property
    def sharers(self) -> int:
        """Number of ranks that divide the update among them."""
        return self.ranks.size if self.is_divided else 1

    @property
    def passes(self) -> int:
        """Forward passes per step of the rank with the most micro-batches."""
        return -(-self.micro_batches // self.places)

    @property
    def places(self) -> int:
        """Number of ranks, or groups of ranks, with their own samples."""
        return self.ranks.size // self.dimensions.same_samples

    @property
    def pass_times(self) -> float:
        """Duration of the passes of a step, in times of a pass: stages of a pipeline wait at its begin and end."""
        return self.passes / (1 - self.dimensions.bubble(self.ranks.size, self.micro_batches))

    @property
    def groups_span_hosts(self) -> bool:
        """Whether ranks that divide matrices, sequences or experts are on several hosts."""
        width = math.lcm(self.dimensions.tp * self.dimensions.cp, self.dimensions.experts)
        return self.ranks.hosts > 1 and self.ranks.per_host % width > 0

    def summing(self, share: float) -> Ranks:
        """Return the ranks that sum what this share of all ranks has: neighbours have other parts."""
        size = round(self.ranks.size * share)
        if self.ranks.hosts == 1:
            return Ranks(size, size)
        stage = self.ranks.size // self.dimensions.pp
        return Ranks(size, max(1, min(stage, self.ranks.per_host) * min(size, stage) // stage))

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
    """The measurements of a run. Seconds are medians over steps.

    Attributes:
        cores: cores of rank 0's host.
        own_cores: cores that rank 0 may use; fewer than `cores` if its launcher bound it.
        threads: that each rank computes with.
        on_cpu: whether the model computes on the CPU.
        gradients: in the order in which backward finishes them; those that it skips come last.
        by_element: whether the optimizer updates each element by itself, so that tensors may be divided.
        step_s: duration of a step.
        parts_s: duration of each of `spans.JOURNAL_KEYS`, and "rest" for everything else, on rank 0.
        tail_s: backward after the last gradient.
        step_uncertainty_s: 95% interval of `step_s` from the spread of steps.
        jitter: how much ranks' computing times differ from step to step.
        fitted: the link.
        late_s: how much later than rank 0 the slowest rank is ready, if all ranks recorded it.
        copy_s_per_byte: to pack a gradient uncompressed; None if not measured.
        buckets: the buckets if they stay as they are; empty to plan them from the job's settings.
        compression_of: what the name of a compression means in this job.
        names: of the trained parameters, in the model's order; empty if unknown.
        notes: what is missing.
    """

    job: Job
    cores: int
    own_cores: int
    threads: int
    on_cpu: bool
    gradients: Sequence[Gradient]
    step_s: float
    parts_s: Mapping[str, float]
    path: Path = Path()
    tail_s: float = 0.0
    step_uncertainty_s: float = 0.0
    jitter: Jitter = field(default_factory=lambda: Jitter(np.zeros(1)))
    fitted: FittedLink = FittedLink(None, "nothing was exchanged", 0.0)
    late_s: float = 0.0
    copy_s_per_byte: float | None = None
    buckets: Sequence[PlannedBucket] = ()
    compression_of: Callable[[str], Compression] = parse
    names: Sequence[str] = ()
    by_element: bool = True
    notes: Sequence[str] = ()

    def cores_are_full(self, ranks: Ranks) -> bool:
        """Whether the thread that exchanges has no core of its own while the rank computes."""
        bound = self.own_cores < self.cores and self.threads >= self.own_cores
        return self.on_cpu and (bound or ranks.per_host * self.threads >= self.cores)


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

    Errors:
        ConfigError: a number is out of range, the compression does not exist, or the model does not know how the
            engine exchanges.
    """
    was = evidence.job
    _check_ranges(change)
    size = change.size or was.ranks.size
    fitting = max(was.ranks.per_host, evidence.cores // max(1, evidence.threads))
    per_host = change.ranks_per_host or (was.ranks.per_host if was.ranks.hosts > 1 else fitting)
    compression = was.compression if change.compression is None else str(parse(change.compression))
    engine = change.engine or was.engine
    job = Job(
        Ranks(size, min(per_host, size)),
        compression,
        was.bucket_mib if change.bucket_mib is None else change.bucket_mib,
        change.global_batch or was.global_batch,
        was.micro_batch,
        engine,
        change.shard or (was.shard if engine == was.engine else "none"),
        was.dimensions,
    )
    if job.dimensions:
        _check_mesh(was, job, change)
    _check_engine(job)
    if job.engine == "fsdp" and not evidence.by_element:
        raise ConfigError(
            "--engine fsdp gives each rank rows of tensors, but the run's optimizer may need whole tensors",
            next_step="--engine horovod --shard optimizer",
        )
    return job


def _check_mesh(was: Job, job: Job, change: Change) -> None:
    job.dimensions.check(job.ranks.size)
    job.dimensions.check_passes(job.ranks.size, job.micro_batches)
    spans_hosts = was.groups_span_hosts or job.groups_span_hosts
    what = ""
    if change.sync is not None or (job.engine, job.shard) != (was.engine, was.shard):
        what = "another engine, shard or sync cannot be predicted"
    elif spans_hosts and (was.ranks.per_host != job.ranks.per_host or change.changes_link):
        what = "the exchange of activations between hosts cannot be predicted"
    if what:
        raise ConfigError(
            f"{what} with {job.dimensions.options}",
            expected="another number of such groups of ranks, global batch, compression or buckets; the same"
            " --ranks_per_host, or a multiple of these groups",
            found=f"{job.ranks.per_host} rank(s) on a host",
            next_step="measure the change, and compare both runs: hvdtrain compare",
        )


def _check_engine(job: Job) -> None:
    options = f"--engine {job.engine} --shard {job.shard}"
    if job.shard not in ENGINES.get(job.engine, ()):
        known = [f"--engine {engine} --shard {shard}" for engine, shards in ENGINES.items() for shard in shards]
        raise ConfigError(f"{options} cannot be predicted", expected=", ".join(known), next_step="choose one of these")
    if job.is_divided and job.ranks.size == 1:
        raise ConfigError(
            f"{options} divides the update among ranks, but there is one rank",
            expected="2 or more ranks",
            next_step="--size 2, or --engine horovod --shard none",
        )
    if job.is_divided and job.compression != "none":
        raise ConfigError(
            f"{options} cannot be predicted with compression {job.compression}",
            expected="--compression none",
            next_step="--compression none, or --engine horovod --shard none",
        )


def _check_ranges(change: Change) -> None:
    above_zero = ("size", "ranks_per_host", "bandwidth_gbit", "bucket_mib", "global_batch")
    for name in (*above_zero, "latency_us", "data_ms", "slow_rank_percent"):
        value = getattr(change, name)
        if value is None:
            continue
        if not math.isfinite(value) or value < 0 or (name in above_zero and value == 0):
            expected = "a number > 0" if name in above_zero else "a number >= 0"
            raise ConfigError(f"--{name} is out of range", expected=expected, found=str(value))
