"""What is to be different from a run, and the job that this makes. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hvdtrain.compression.table import parse
from hvdtrain.errors import ConfigError
from hvdtrain.timeline.whatif.evidence import Evidence, Job
from hvdtrain.timeline.whatif.links import Algorithm, Ranks


@dataclass(frozen=True)
class Change:
    """What is to be different; None where it stays.

    Attributes:
        size: ranks.
        ranks_per_host: of them on a host.
        bandwidth_gbit: of each host's link.
        latency_us: of a small message between two ranks.
        algorithm: of allreduces.
        compression: as the option has it.
        bucket_mib: as the option has it.
        global_batch: samples a step.
        data_ms: of a step, loading.
        slow_rank_percent: by which one rank computes more slowly than the others.
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
    """The job with the change.

    Errors:
        ConfigError: it cannot be.
    """
    was = evidence.job
    _check(change)
    size = change.size or was.ranks.size
    room = max(was.ranks.per_host, evidence.cores // max(1, evidence.threads))
    per_host = change.ranks_per_host or (was.ranks.per_host if was.ranks.hosts > 1 else room)
    compression = was.compression if change.compression is None else str(parse(change.compression))
    return Job(
        Ranks(size, min(per_host, size)),
        compression,
        was.bucket_mib if change.bucket_mib is None else change.bucket_mib,
        change.global_batch or was.global_batch,
        was.micro_batch,
    )


def _check(change: Change) -> None:
    above_zero = ("size", "ranks_per_host", "bandwidth_gbit", "bucket_mib", "global_batch")
    for name in (*above_zero, "latency_us", "data_ms", "slow_rank_percent"):
        value = getattr(change, name)
        if value is None:
            continue
        if not math.isfinite(value) or value < 0 or (name in above_zero and value == 0):
            wanted = "a number above 0" if name in above_zero else "a number from 0 on"
            raise ConfigError(f"--{name} is out of range", expected=wanted, found=str(value))
