"""Traces as columns: what readers make and the analysis takes. Times of one run are all in one clock.

That clock is rank 0's CLOCK_MONOTONIC in microseconds (`time.perf_counter_ns() / 1e3` there); other ranks' times and
Horovod's are moved onto it by their readers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.spans import PARTS as PARTS

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]


@dataclass(frozen=True)
class HorovodTrace:
    """One Timeline file of Horovod: all of a job, or a window of it, as rank 0 saw it.

    Attributes:
        path: of the file.
        epoch_us: the wall clock at time 0; None where the file does not say.
        tensors: names, by number.
        phases: names, by number: NEGOTIATE_ALLREDUCE, ALLREDUCE, QUEUE, MEMCPY_IN_FUSION_BUFFER, MPI_ALLREDUCE, ...
        tensor: of each interval [n].
        phase: of each interval [n].
        start_us: of each interval [n], by the file's own clock; ordered by the time at which they ended.
        duration_us: of each interval [n].
        nbytes: of the tensor, where the closing event says dtype and shape, else -1 [n].
        tick_tensor: whose turn it was [m].
        tick_rank: which rank was ready then [m].
        tick_us: when [m].
        dropped: what could not be read, in plain words; empty where everything could.
    """

    path: Path
    epoch_us: float | None
    tensors: Sequence[str]
    phases: Sequence[str]
    tensor: Ints
    phase: NDArray[np.int16]
    start_us: Floats
    duration_us: Floats
    nbytes: NDArray[np.int64]
    tick_tensor: Ints
    tick_rank: Ints
    tick_us: Floats
    dropped: Sequence[str] = ()


@dataclass(frozen=True)
class BucketFacts:
    """What one exchange carries.

    Attributes:
        name: what its collectives' names begin with.
        parameters: names.
        shapes: of these.
        dtype: as torch names it, "float32".
        length: elements, gaps included.
    """

    name: str
    parameters: Sequence[str]
    shapes: Sequence[Sequence[int]]
    dtype: str
    length: int


@dataclass(frozen=True)
class RankSpans:
    """Spans of one rank in one start of a run, of the steps that were traced.

    Attributes:
        rank, host: whose.
        names: of spans, by number.
        name: of each span [n].
        track: of each span [n]: `hvdtrain.spans.MAIN`, `DEVICE`, and from `EXCHANGE` on one a bucket.
        step: of each span [n].
        start_us, end_us: of each span [n].
        buckets: by track.
        clock_error_us: by how much the times may be off those of rank 0.
    """

    rank: int
    host: str
    names: Sequence[str]
    name: NDArray[np.int16]
    track: Ints
    step: Ints
    start_us: Floats
    end_us: Floats
    buckets: Mapping[int, BucketFacts]
    clock_error_us: float = 0.0


@dataclass(frozen=True)
class StepTable:
    """Every rank's stamps of many steps, of one start of a run.

    Steps come in blocks of consecutive ones; between blocks some may be left out.

    Attributes:
        hosts: of the ranks, in their order.
        step: numbers [steps], ascending.
        block: the block that each is of [steps].
        start_us: a step begins [ranks, steps].
        ready_us: all of its gradients are there, and the rank begins to wait for the sums [ranks, steps].
        released_us: it has the sums [ranks, steps].
        end_us: the step is over [ranks, steps].
        parts_us: by name of `PARTS` and "gc" (which lies inside of the others), durations [ranks, steps].
        facts: of each block, figures by name with one number a rank, None where unknown: "cpu_wait_us" (the training
            thread was ready to run and had no core, over the block), "steal_us" (another machine had the host's core),
            "gpu_clock_mhz", "gpu_temperature_c", "gpu_throttle" (text), "expert_share" (of the tokens, that of the
            expert with most of them, 1 over the number of experts where they are even).
        clock_error_us: by how much a rank's times may be off those of rank 0 [ranks].
    """

    hosts: Sequence[str]
    step: Ints
    block: Ints
    start_us: Floats
    ready_us: Floats
    released_us: Floats
    end_us: Floats
    parts_us: Mapping[str, Floats]
    facts: Sequence[Mapping[str, Sequence[Any]]]
    clock_error_us: Floats


@dataclass(frozen=True)
class RunTrace:
    """All that one run (its last start with stamps), or one Horovod Timeline by itself, left to be explained.

    Attributes:
        path: the run's folder, or the Timeline file.
        size: ranks; 0 where nothing says.
        config: the run's options, resolved; empty for a Timeline by itself.
        steps: None for a Timeline by itself, and where ranks left none.
        spans: of the ranks that left any.
        horovod: segments, moved onto the run's clock where there is one.
        machine: events ``machine`` of the journal.
        warnings: of the run, and lines that Horovod or NCCL wrote into its output.
        link: what was measured of the link at the run's start: pairs of bytes and seconds of an allreduce.
        notes: what is missing or was dropped, in plain words.
        is_part: `steps` are of the last round only: the run did others before, with other ranks or before a resume.
    """

    path: Path
    size: int
    config: Mapping[str, Any] = field(default_factory=dict)
    steps: StepTable | None = None
    spans: Sequence[RankSpans] = ()
    horovod: Sequence[HorovodTrace] = ()
    machine: Sequence[Mapping[str, Any]] = ()
    warnings: Sequence[str] = ()
    link: Sequence[tuple[int, float]] = ()
    notes: Sequence[str] = ()
    is_part: bool = False

    @property
    def spans_of_rank_0(self) -> RankSpans | None:
        """None where it left none."""
        return next((spans for spans in self.spans if spans.rank == 0), None)
