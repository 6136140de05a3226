"""Traces as columns, from the readers to the analysis. All times of a run are on one clock.

It is rank 0's CLOCK_MONOTONIC in microseconds (`time.perf_counter_ns() / 1e3`). The readers convert the times of other
ranks and of Horovod.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.observe.past_journal import JournalStart

if TYPE_CHECKING:
    from hvdtrain.timeline.whatif.evidence import Evidence

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]


@dataclass(frozen=True)
class HorovodTrace:
    """A Timeline file of Horovod, written by rank 0: a whole job or a window of it.

    Attributes:
        epoch_us: the wall clock at time 0; None if unknown.
        tensors, phases: names, by number: of phases NEGOTIATE_ALLREDUCE, QUEUE, MEMCPY_IN_FUSION_BUFFER, ...
        tensor, phase, duration_us: of each interval [n].
        start_us: of each interval [n], by the file's own clock; ordered by end.
        nbytes: of the tensor, from dtype and shape in the end event; -1 if unknown [n].
        tick_tensor, tick_rank, tick_us: which rank became ready for which tensor, and when [m].
        dropped: sentences about what could not be read; empty if everything was read.
    """

    path: Path
    epoch_us: float | None
    tensors: Sequence[str]
    phases: Sequence[str]
    tensor: Ints
    phase: Ints
    start_us: Floats
    duration_us: Floats
    nbytes: NDArray[np.int64]
    tick_tensor: Ints
    tick_rank: Ints
    tick_us: Floats
    dropped: Sequence[str] = ()

    @property
    def named_damage(self) -> list[str]:
        """`dropped`, with the file's name."""
        return [f"{self.path.name}: {line}" for line in self.dropped]


@dataclass(frozen=True)
class BucketFacts:
    """The content of a bucket: its parameters' names and shapes, and its `length` in elements, including gaps.

    The name is the prefix of its collectives' names. The dtype is in torch's spelling, "float32".
    """

    name: str
    parameters: Sequence[str]
    shapes: Sequence[Sequence[int]]
    dtype: str
    length: int


@dataclass(frozen=True)
class RankSpans:
    """Spans of one rank in one start of a run, of the recorded steps.

    Attributes:
        names: of spans, by number.
        name, step, start_us, end_us: of each span [n].
        track: of each span [n]: `hvdtrain.spans.MAIN`, `DEVICE`, and from `EXCHANGE` on one per bucket.
        buckets: by track.
        clock_error_us: bound of the error of the times, compared with rank 0's.
        epoch_us: the wall clock at time 0 of their clock.
        clock_id: of the rank's own clock; equal ones are the same.
        start: number of the start; -1 if unknown.
        dropped: number of the first spans, which are left out.
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
    epoch_us: float = 0.0
    clock_id: str = ""
    start: int = -1
    dropped: int = 0

    def named(self, name: str) -> NDArray[np.bool_]:
        """Return which spans have this name [n]."""
        return np.isin(self.name, [number for number, each in enumerate(self.names) if each == name])


@dataclass(frozen=True)
class StepTable:
    """The step stamps of all ranks in one start of a run.

    Steps are in blocks of consecutive ones. Steps between blocks may be missing, and so may steps that a rank lacks.

    Attributes:
        hosts: of the ranks, in order.
        step, block: numbers of steps, ascending, and of their blocks [steps].
        start_us: the step begins [ranks, steps].
        ready_us: all gradients are computed, and the rank begins to wait for the sums [ranks, steps].
        released_us: the rank has the sums [ranks, steps].
        end_us: the step ends [ranks, steps].
        parts_us: durations by name, of `PARTS` and "gc" (which overlaps the others) [ranks, steps].
        facts: of each block, figures by name with one number per rank, None if unknown: "cpu_wait_us" (the training
            thread waited for a core, over the block), "stopped_us" (the process was stopped), "steal_us" (another
            virtual machine used the host's core), "gpu_clock_mhz", "gpu_temperature_c", "gpu_throttle" (text),
            "expert_share" (share of tokens of the busiest expert; 1 / experts if balanced).
        clock_error_us: bound of the error of a rank's times, compared with rank 0's [ranks].
        elements: of each rank's batches, in the largest tensor of each; 0 if unknown [ranks, steps].
        stages: of each pipeline: equally many ranks with the same layers follow each other.
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
    elements: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    stages: int = 1


@dataclass(frozen=True)
class JournalSteps:
    """Steps of a start in the journal, by the clock of rank 0; of a long start, evenly spread ones.

    Attributes:
        step, step_ms: numbers, ascending, and durations [n].
        parts_ms: of each of `spans.JOURNAL_KEYS` [n].
        tokens: weight of each step's batch; NaN if unknown [n].
        time_s: end of each step, seconds since 1970; NaN if unknown [n].
    """

    step: NDArray[np.int64]
    step_ms: Floats
    parts_ms: Mapping[str, Floats]
    tokens: Floats
    time_s: Floats | None = None

    @property
    def count(self) -> int:
        """The number of steps from the first to the last."""
        return int(self.step[-1] - self.step[0]) + 1


@dataclass(frozen=True)
class RunTrace:
    """The traces of a run (its last start with enough stamps), or Horovod Timelines alone.

    Attributes:
        path: the run's folder, or the Timeline file.
        size: number of ranks; 0 if unknown.
        config: the run's resolved options; empty for Timelines alone.
        steps, spans: None and of no rank for Timelines alone, and if they were not recorded.
        horovod: segments, on the run's clock if there is one.
        warnings: of the run, and lines of Horovod and NCCL in its output.
        link: allreduces measured at the run's start: pairs of bytes and seconds.
        notes: sentences about missing or dropped data.
        is_part: `steps` are only of one start or round; others had other ranks, or were before a resume.
        starts: all starts of the run in its journal.
        start: the one that is analysed; empty if the journal does not have it.
        journal: its steps; None if there is no journal.
        history: steps of all starts, without those that a later start repeated; None if there is no journal.
        stamped: all starts with stamps: the index in `starts`, -1 if the journal does not have it, and the stamps.
        evidence: reads what predictions of changes need; None if the run lacks it.
    """

    path: Path
    size: int
    config: Mapping[str, Any] = field(default_factory=dict)
    steps: StepTable | None = None
    spans: Sequence[RankSpans] = ()
    horovod: Sequence[HorovodTrace] = ()
    warnings: Sequence[str] = ()
    link: Sequence[tuple[int, float]] = ()
    notes: Sequence[str] = ()
    is_part: bool = False
    starts: Sequence[JournalStart] = ()
    start: JournalStart = field(default_factory=lambda: JournalStart({}))
    journal: JournalSteps | None = None
    history: JournalSteps | None = None
    stamped: Sequence[tuple[int, StepTable]] = ()
    evidence: Callable[[], Evidence | None] = lambda: None

    def newest(self, event: str) -> Mapping[str, Any]:
        """Return the newest event of a name; empty without one."""
        return (self.start.events_named(event) or [{}])[-1]

    @property
    def spans_of_rank_0(self) -> RankSpans | None:
        """None if there are none."""
        return next((spans for spans in self.spans if spans.rank == 0), None)
