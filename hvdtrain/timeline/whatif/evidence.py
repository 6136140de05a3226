"""What a run has left that a prediction is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hvdtrain.timeline.whatif.bucket_plan import Gradient
from hvdtrain.timeline.whatif.jitter import Jitter
from hvdtrain.timeline.whatif.links import Link, Ranks


@dataclass(frozen=True)
class Job:
    """How a job is made: what a prediction may change.

    Attributes:
        ranks: how many, and on how many hosts.
        compression: as options name it.
        bucket_mib: as the option has it; None for what suits the ranks.
        global_batch, micro_batch: samples.
    """

    ranks: Ranks
    compression: str
    bucket_mib: float | None
    global_batch: int
    micro_batch: int

    @property
    def passes(self) -> int:
        """Forward passes a step of the rank that has most."""
        return -(-self.micro_batches // self.ranks.size)

    @property
    def micro_batches(self) -> int:
        """Of a step, of all ranks."""
        return -(-self.global_batch // self.micro_batch)


@dataclass(frozen=True)
class Fitted:
    """A link, and how far it is known.

    Attributes:
        link: None where nothing was exchanged.
        source: what it follows from, in words.
        off: by how much its speed may be off, as a share of it.
    """

    link: Link | None
    source: str
    off: float


@dataclass(frozen=True)
class Evidence:
    """A run as it was measured. Seconds of a typical step (medians).

    Attributes:
        path: of the run.
        job: as it ran.
        cores: of rank 0's host.
        own_cores: of them, those that rank 0 may use: fewer where its launcher bound it.
        threads: that a rank computes with.
        on_cpu: whether gradients are made where Python runs.
        gradients: those that backward has first come first; what it leaves out comes last.
        tail_s: of backward, after the last gradient.
        step_s: of a step.
        parts_s: of it, rank 0's by name of their spans.
        off_s: by how much `step_s` may be off for the spread of steps (95%).
        compute_s: of all ranks that are known, from a step's start to the end of backward [ranks, steps].
        jitter: of that.
        fitted: the link.
        late_s: by which the last rank is ready after rank 0, where stamps of all ranks tell.
        copy_s_per_byte: packing as they are; None where nothing was packed.
        notes: what is missing.
    """

    path: Path
    job: Job
    cores: int
    own_cores: int
    threads: int
    on_cpu: bool
    gradients: Sequence[Gradient]
    tail_s: float
    step_s: float
    parts_s: Mapping[str, float]
    off_s: float
    compute_s: NDArray[np.float64]
    jitter: Jitter
    fitted: Fitted
    late_s: float = 0.0
    copy_s_per_byte: float | None = None
    notes: Sequence[str] = field(default=())

    def cores_are_full(self, ranks: Ranks) -> bool:
        """Whether a rank that computes leaves no core to the thread that exchanges."""
        bound = self.own_cores < self.cores and self.threads >= self.own_cores
        return self.on_cpu and (bound or ranks.per_host * self.threads >= self.cores)
