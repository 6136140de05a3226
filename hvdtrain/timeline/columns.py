"""Traces as columns, from the readers to the analysis. All times of a run are on one clock.

It is rank 0's CLOCK_MONOTONIC in microseconds (`time.perf_counter_ns() / 1e3`). The readers convert the times of other
ranks and of Horovod.
"""

from __future__ import annotations

import math
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
    """A Timeline file of Horovod, written by rank 0: a whole job or a window of it."""

    path: Path
    epoch_us: float | None  # the wall clock at time 0; None if unknown
    tensors: Sequence[str]  # names, by number
    phases: Sequence[str]  # names, by number: NEGOTIATE_ALLREDUCE, QUEUE, MEMCPY_IN_FUSION_BUFFER, ...
    tensor: Ints  # of each interval [n]
    phase: Ints  # of each interval [n]
    start_us: Floats  # of each interval [n], by the file's own clock; ordered by end
    duration_us: Floats  # of each interval [n]
    nbytes: NDArray[np.int64]  # of the tensor, from dtype and shape in the end event; -1 if unknown [n]
    tick_tensor: Ints  # the tensor for which a rank became ready [m]
    tick_rank: Ints  # that rank [m]
    tick_us: Floats  # when [m]
    dropped: Sequence[str] = ()  # sentences about what could not be read; empty if everything was read

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
    """Spans of one rank in one start of a run, of the recorded steps. Name, step and times are of each span [n]."""

    rank: int
    host: str
    names: Sequence[str]  # of spans, by number
    name: NDArray[np.int16]
    track: Ints  # of each span [n]: `hvdtrain.spans.MAIN`, `DEVICE`, and from `EXCHANGE` on one per bucket
    step: Ints
    start_us: Floats
    end_us: Floats
    buckets: Mapping[int, BucketFacts]  # by track
    clock_error_us: float = 0.0  # bound of the error of the times, compared with rank 0's
    epoch_us: float = 0.0  # the wall clock at time 0 of their clock
    clock_id: str = ""  # of the rank's own clock; equal ones are the same
    start: int = -1  # number of the start; -1 if unknown
    dropped: int = 0  # number of the first spans, which are left out

    def named(self, name: str) -> NDArray[np.bool_]:
        """Return which spans have this name [n]."""
        return np.isin(self.name, [number for number, each in enumerate(self.names) if each == name])


@dataclass(frozen=True)
class StepTable:
    """The step stamps of all ranks in one start of a run.

    Steps are in blocks of consecutive ones. Steps between blocks may be missing, and so may steps that a rank lacks.

    Attributes:
        facts: of each block, figures by name with one number per rank, None if unknown: "cpu_wait_us" (the training
            thread waited for a core, over the block), "stopped_us" (the process was stopped), "steal_us" (another
            virtual machine used the host's core), "gpu_clock_mhz", "gpu_temperature_c", "gpu_throttle" (text),
            "expert_share" (share of tokens of the busiest expert; 1 / experts if balanced).
        elements: of each rank's batches, in the largest tensor of each; 0 if unknown [ranks, steps].
    """

    hosts: Sequence[str]  # of the ranks, in order
    step: Ints  # numbers of steps, ascending [steps]
    block: Ints  # numbers of their blocks [steps]
    start_us: Floats  # the step begins [ranks, steps]
    ready_us: Floats  # all gradients are computed, and the rank begins to wait for the sums [ranks, steps]
    released_us: Floats  # the rank has the sums [ranks, steps]
    end_us: Floats  # the step ends [ranks, steps]
    parts_us: Mapping[str, Floats]  # durations by name, of `PARTS` and "gc" (which overlaps the others) [ranks, steps]
    facts: Sequence[Mapping[str, Sequence[Any]]]
    clock_error_us: Floats  # bound of the error of a rank's times, compared with rank 0's [ranks]
    devices: Sequence[str] = ()  # UUIDs of the ranks' GPUs; empty for CPUs, and where they are unknown
    elements: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    stages: int = 1  # of each pipeline: equally many ranks with the same layers follow each other


@dataclass(frozen=True)
class StampedStart:
    """The stamps of a start, with its events ``shares`` and ``wrong_rank``, and its config.

    `epoch_s` is the time since 1970 at time 0 of the stamps; NaN if unknown.
    """

    steps: StepTable
    shares: Sequence[Mapping[str, Any]] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    epoch_s: float = math.nan
    wrong: Sequence[Mapping[str, Any]] = ()

    def time_s(self, column: int) -> float | None:
        """Return when a step ended on rank 0, since 1970; None if unknown."""
        found = self.epoch_s + float(self.steps.end_us[0, column]) / 1e6
        return round(found, 3) if math.isfinite(found) else None


@dataclass(frozen=True)
class JournalSteps:
    """Steps of a start in the journal, by the clock of rank 0; of a long start, evenly spread ones."""

    step: NDArray[np.int64]  # numbers, ascending [n]
    step_ms: Floats  # durations [n]
    parts_ms: Mapping[str, Floats]  # of each of `spans.JOURNAL_KEYS` [n]
    tokens: Floats  # weight of each step's batch; NaN if unknown [n]
    time_s: Floats | None = None  # end of each step, seconds since 1970; NaN if unknown [n]

    @property
    def count(self) -> int:
        """The number of steps from the first to the last."""
        return int(self.step[-1] - self.step[0]) + 1


@dataclass(frozen=True)
class RunTrace:
    """The traces of a run (its last start with enough stamps), or Horovod Timelines alone.

    Attributes:
        steps, spans: None and of no rank for Timelines alone, and if they were not recorded.
        start: the one that is analysed; empty if the journal does not have it.
        stamped: all starts with stamps: the index in `starts`, -1 if the journal does not have it, and the stamps.
        evidence: reads what predictions of changes need; None if the run lacks it.
    """

    path: Path  # the run's folder, or the Timeline file
    size: int  # number of ranks; 0 if unknown
    config: Mapping[str, Any] = field(default_factory=dict)  # the run's resolved options; empty for Timelines alone
    steps: StepTable | None = None
    spans: Sequence[RankSpans] = ()
    horovod: Sequence[HorovodTrace] = ()  # segments, on the run's clock if there is one
    warnings: Sequence[str] = ()  # of the run, and lines of Horovod and NCCL in its output
    link: Sequence[tuple[int, float]] = ()  # allreduces measured at the run's start: pairs of bytes and seconds
    notes: Sequence[str] = ()  # sentences about missing or dropped data
    is_part: bool = False  # `steps` are only of one start or round; others had other ranks, or were before a resume
    starts: Sequence[JournalStart] = ()  # all starts of the run in its journal
    start: JournalStart = field(default_factory=lambda: JournalStart({}))
    journal: JournalSteps | None = None  # its steps; None if there is no journal
    history: JournalSteps | None = None  # of all starts, without steps that a later one repeated; None without journal
    stamped: Sequence[tuple[int, StepTable]] = ()
    evidence: Callable[[], Evidence | None] = lambda: None

    def newest(self, event: str) -> Mapping[str, Any]:
        """Return the newest event of a name; empty without one."""
        return (self.start.events_named(event) or [{}])[-1]

    @property
    def spans_of_rank_0(self) -> RankSpans | None:
        """None if there are none."""
        return next((spans for spans in self.spans if spans.rank == 0), None)
