"""The change that a prediction is about, and the job that it results in. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hvdtrain.compression.table import parse
from hvdtrain.errors import ConfigError
from hvdtrain.timeline.whatif.evidence import Evidence, Job
from hvdtrain.timeline.whatif.links import Algorithm, Ranks


@dataclass(frozen=True)
class Change:
    """The settings to change; None keeps a setting.

    Attributes:
        size: world size.
        ranks_per_host: ranks on each host.
        bandwidth_gbit: bandwidth of each host's link.
        latency_us: time of a small message between two ranks.
        algorithm: of allreduces.
        compression: as `--parallel.compression`.
        bucket_mib: as `--parallel.bucket_mib`.
        global_batch: samples per step.
        data_ms: time per step to load data.
        slow_rank_percent: how much slower than the others one rank computes.
    """

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


def changed_job(evidence: Evidence, change: Change) -> Job:
    """Return the job after the change.

    Errors:
        ConfigError: a number is out of range, or the compression does not exist.
    """
    was = evidence.job
    _check_ranges(change)
    size = change.size or was.ranks.size
    fitting = max(was.ranks.per_host, evidence.cores // max(1, evidence.threads))
    per_host = change.ranks_per_host or (was.ranks.per_host if was.ranks.hosts > 1 else fitting)
    compression = was.compression if change.compression is None else str(parse(change.compression))
    return Job(
        Ranks(size, min(per_host, size)),
        compression,
        was.bucket_mib if change.bucket_mib is None else change.bucket_mib,
        change.global_batch or was.global_batch,
        was.micro_batch,
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
