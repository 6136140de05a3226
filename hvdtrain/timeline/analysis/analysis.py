"""The result of an analysis, which the terminal, JSON, HTML and TensorBoard show. Times are milliseconds per step.

The JSON Schema of the report is generated from these types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from hvdtrain.observe.cost import Cost

Count = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1.000001)]
Bound = Annotated[float, Meta(extra_json_schema={"nullable": True})]
"""A number that may be infinite or NaN, which is null in JSON."""


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95% confidence interval."""

    value: float
    low: Bound
    high: Bound


@dataclass(frozen=True)
class Part:
    """A part of a whole.

    Its time is per step; its share of the whole is 0 to 1.
    """

    name: str
    ms: Estimate
    share: Share


@dataclass(frozen=True)
class Budget:
    """The parts of a step's wall time. They sum to it.

    Attributes:
        what: the ranks measured: "rank 0", "mean of 4 ranks", "rank 0's communication"; with step numbers if the run
            has other rounds.
        parts: data, forward, backward, waiting for late ranks, exposed communication (negotiation, queue, fusion
            copies, transfer, other), optimizer, evaluations and checkpoints, rest. Parts of 0 ms are omitted.
        exposed: names of the parts that are exposed communication: what ranks wait for it after the last one is ready.
            None if that is unknown, as in a Timeline alone.
    """

    what: str
    step_ms: Estimate  # wall time of a step
    steps: Count  # number of steps measured; 0 if a Timeline has no recognisable steps: then times are totals
    parts: Sequence[Part]
    exposed: Sequence[str] | None
    absent: Sequence[str] = ()  # names of the parts that were measured, and are omitted

    @property
    def exposed_parts(self) -> list[Part]:
        """The parts that are exposed communication; none if that is unknown."""
        return [part for part in self.parts if part.name in (self.exposed or ())]


@dataclass(frozen=True)
class Communication:
    """The gradient exchange, hidden or exposed. None means unknown.

    Bus bandwidth is as NCCL defines it: 2 (n - 1) / n of the bytes of an allreduce per second, in units of 1e9 bytes.
    """

    phases: Sequence[Part]  # negotiation, queue, fusion copies, transfer. Overlapping operations count once
    busy_ms: float | None  # union of all phases, per step
    hidden_share: float | None  # share of `busy_ms` that overlaps with computation, 0 to 1
    bytes_per_step: float | None  # bytes that a rank passes to collectives
    bus_gb_per_s: float | None  # bus bandwidth during transfers
    link_gb_per_s: float | None  # the same for a large allreduce without other load, measured by a probe


@dataclass(frozen=True)
class Carrier:
    """The cost of a bucket or a tensor.

    `modules` own its gradients. Bytes are per exchange. Times are per step, from the first rank being ready to the
    result.
    """

    name: str
    modules: Sequence[str]
    nbytes: int | None
    ms: Annotated[float, Meta(ge=0)]
    exposed_ms: float | None


@dataclass(frozen=True)
class Cause:
    """A difference between a late rank and the others.

    Its name is data, forward, backward, optimizer, gc, cpu (no core was free), steal, stopped, gpu clock, gpu throttle
    or experts; `ms`, per step, is more than the median of the other ranks, None if the cause is not a time.
    """

    name: str
    ms: float | None
    text: str


@dataclass(frozen=True)
class RankRow:
    """One rank in comparison with the others.

    It is ready `behind_ms` later than the median of the others, less its waits for activations and parameters of
    others: median over steps.
    """

    rank: Count
    host: str
    last_share: Share  # share of the steps in which the rank was the last to be ready, 0 to 1
    cost_ms: Estimate  # how much shorter a step would be if the rank were like the others
    parts_ms: Mapping[str, float]  # mean per step, by part
    clock_error_ms: Bound  # bound of the error of the rank's times, compared with rank 0's
    behind_ms: float = 0.0


@dataclass(frozen=True)
class Spell:
    """Steps in which a rank was a straggler that was none in others.

    Figures are as of `RankRow`, in these steps. `lasts`: it still was one in the last recorded step.
    """

    rank: Count
    first_step: Count
    last_step: Count
    cost_ms: Estimate
    last_share: Share
    behind_ms: float
    lasts: bool


@dataclass(frozen=True)
class StartUp:
    """Slow steps at the beginning, as of a compilation: how many, by how much longer they took in all, a usual step."""

    steps: Count
    extra_ms: float
    usual_ms: float


@dataclass(frozen=True)
class Change:
    """A stretch of steps that took longer on all ranks than usual. By the clock of rank 0, medians over steps."""

    first_step: Count
    last_step: Count
    begins: bool  # whether it has the first step after the start-up
    lasts: bool  # whether it has the last step of the run
    usual_ms: float  # of a usual step
    step_ms: float  # of one of these
    share: Share  # of the run's steps, those that are in it
    parts_ms: Mapping[str, float]  # by how much longer parts of the step take, if they explain much of it
    coincided: Sequence[str]  # sentences about what else was different then


@dataclass(frozen=True)
class Moment:
    """Neighbouring steps of a run, of any of its starts. By the clock of rank 0, in ms.

    Parts are means, which sum to the mean step. `after_s`: from the beginning of the run to that of these steps, with
    the time between starts; None if unknown.
    """

    first_step: Count
    last_step: Count
    step_ms: float
    median_ms: float
    parts_ms: Mapping[str, float]
    after_s: float | None = None


@dataclass(frozen=True)
class Mark:
    """What happened at a step, as one sentence: a start of the run with its ranks, a change, or a straggler."""

    kind: Literal["start", "change", "straggler"]
    step: Count
    text: str


@dataclass(frozen=True)
class OverTime:
    """The step time over a run: moments of equal length, and what happened, in their order."""

    moments: Sequence[Moment]
    marks: Sequence[Mark]


_MOST_OF_HOST = 0.75


@dataclass(frozen=True)
class Blame:
    """The stragglers: ranks for which the others wait.

    Attributes:
        source: stamps: ours, of all ranks; ticks: Horovod's, of the steps in which it wrote them; none: no data.
        causes: of each straggler, largest first.
        together: number of consecutive ranks that wait for each other within passes, where nobody measures it: any of
            them may be the slow one.
    """

    source: Literal["stamps", "ticks", "none"]
    steps: Count  # number of steps measured
    ranks: Sequence[RankRow]  # all ranks, most costly first
    late: Sequence[Count]  # stragglers with a statistically significant cost, most costly first
    causes: Annotated[Mapping[int, Sequence[Cause]], Meta(extra_json_schema={"propertyNames": {"pattern": "^[0-9]+$"}})]
    reason: str = ""  # why there is no straggler
    spells: Sequence[Spell] = ()  # of stragglers that were none in some of the steps, in their order
    together: Count = 1
    first_step: Count = 0  # of the start; 0 without stamps
    last_step: Count = 0
    unknown: bool = False  # whether there may be stragglers: too few steps, or clocks that were never compared

    def group_of(self, rank: int) -> list[int]:
        """Return the ranks that are slow together with a rank."""
        first = rank // self.together * self.together
        return list(range(first, first + self.together))

    def late_groups(self, ranks: Sequence[int] | None = None) -> list[list[int]]:
        """Return those of the stragglers in `ranks` (default: all) that wait for each other, most costly first."""
        found: dict[int, list[int]] = {}
        for rank in self.late if ranks is None else ranks:
            found.setdefault(rank // self.together, []).append(rank)
        return list(found.values())

    def spells_of(self, rank: int) -> list[Spell]:
        """Return the spells of a rank, in their order."""
        return [spell for spell in self.spells if spell.rank == rank]

    def slow_hosts(self) -> dict[str, list[int]]:
        """Return the hosts where most ranks are stragglers, with these ranks; none if there are no other hosts."""
        of_host: dict[str, list[int]] = {}
        for row in sorted(self.ranks, key=lambda row: row.rank):
            of_host.setdefault(row.host, []).append(row.rank)
        found = {host: [rank for rank in ranks if rank in self.late] for host, ranks in of_host.items()}
        most = {host: own for host, own in found.items() if len(own) >= max(2, _MOST_OF_HOST * len(of_host[host]))}
        return most if len(of_host) > 1 else {}

    def worst_ms(self) -> dict[int, float]:
        """Return the cost of each straggler per step, in its most costly spell; on a slow host, that of the host."""
        rows = {row.rank: row.cost_ms.value for row in self.ranks}
        own = {rank: [spell.cost_ms.value for spell in self.spells_of(rank)] for rank in self.late}
        worst = {rank: max(costs, default=rows[rank]) for rank, costs in own.items()}
        for ranks in self.slow_hosts().values():
            worst |= dict.fromkeys(ranks, sum(worst[rank] for rank in ranks))
        return worst


@dataclass(frozen=True)
class Finding:
    """A problem worth knowing."""

    kind: str  # a fixed short name: straggler, exposed, input, gc, small_buckets, bandwidth, stall, ...
    text: str
    cost_ms: float | None  # upper bound of the gain per step; None if unknown. Findings are ordered by it
    advice: str


@dataclass(frozen=True)
class Memory:
    """The memory of rank 0.

    `where` is GPU or host. MiB by kind, such as gradients and rest, sum to the peak.
    """

    where: str
    mib: Mapping[str, float]


@dataclass(frozen=True)
class OuterSteps:
    """The outer steps of workers that train apart. Figures are means over them."""

    sync: str  # the option --parallel.sync
    workers: Count
    count: Count  # number of outer steps
    sent_bytes: float  # of rank 0 in each
    wait_ms: float  # of rank 0 in each
    cosine: float  # between the change of a worker and the mean change, the least of all workers
    drift: float  # distance of a worker from the mean, over the norm of the mean change


USEFUL = "training"
"""The use of device-hours that counts."""


@dataclass(frozen=True)
class Goodput:
    """What the device-hours of a run were used for.

    `energy` is the share of the measured energy of training that steps which count have used, 0 to 1, with the
    evaluations and pauses between them; None if it was not measured in every start.
    """

    hours: Mapping[str, float]  # by use (`goodput.USES`); they sum to the device-hours of the run's cost
    energy: float | None = None

    @property
    def share(self) -> float:
        """The goodput: the share of `USEFUL`, 0 to 1."""
        total = sum(self.hours.values())
        return self.hours.get(USEFUL, 0.0) / total if total else 0.0


@dataclass(frozen=True)
class Efficiency:
    """Shares of the peak FLOP/s of the devices: used by the model (MFU), and lost, by reason. They sum to 1."""

    mfu: Share
    lost: Mapping[str, Share]


@dataclass(frozen=True)
class Scaling:
    """The speed of a device on `ranks` ranks over that on `fewer` ranks, in the same run."""

    fewer: Count
    ranks: Count
    efficiency: float


@dataclass(frozen=True)
class Analysis:
    """The analysis of a run.

    Cost, goodput, the budget and `over_time` are of all starts of the run.
    """

    title: str
    size: Count  # number of ranks; 0 if unknown
    budget: Budget | None  # None if no step was measured
    communication: Communication | None
    carriers: Annotated[Sequence[Carrier], Meta(max_length=10)]  # most costly first
    blame: Blame
    findings: Sequence[Finding]  # most costly first
    warnings: Sequence[str] = ()  # lines of Horovod, NCCL and the run
    notes: Sequence[str] = ()  # data that is missing or was dropped, and the precision of the clocks
    memory: Memory | None = None
    cost: Cost | None = None
    goodput: Goodput | None = None
    efficiency: Efficiency | None = None  # None if the FLOPs of the model or the peak of the devices are unknown
    scaling: Scaling | None = None  # None unless the run had starts on different numbers of ranks
    outer: OuterSteps | None = None  # None if ranks exchange in every step
    start_up: StartUp | None = None  # None if the first steps took no longer than others
    changes: Sequence[Change] = ()  # stretches in which all ranks were slower, in their order
    over_time: OverTime | None = None
    others: Sequence[Blame] = ()  # of other starts and rounds with stragglers than that of `blame`, in order


def part_figure(part: str) -> str:
    """Return the name of the figure of a part of the budget."""
    return f"{part.replace(' ', '_')}_ms"


def figures(analysis: Analysis) -> dict[str, float]:
    """Return the figures that ``--fail_if`` and TensorBoard use, by name. Unknown ones are absent.

    goodput (0 to 1, of all starts), mfu, scaling_efficiency, step_ms, straggler_ms (of the worst one of all rounds,
    in the steps in which it was late; 0 without), straggler_rank, exposed_ms, exposed_share, hidden_share,
    bus_gb_per_s, and PART_ms for each part of the budget (underscores for spaces).
    """
    communication, blame = analysis.communication, analysis.blame
    blames = [blame, *analysis.others]
    worst = max((each.worst_ms() for each in blames), key=lambda each: max(each.values(), default=0.0))
    found = {
        "goodput": analysis.goodput.share if analysis.goodput else None,
        "mfu": analysis.efficiency.mfu if analysis.efficiency else None,
        "scaling_efficiency": analysis.scaling.efficiency if analysis.scaling else None,
        "straggler_ms": max(worst.values(), default=0.0) if not all(each.unknown for each in blames) else None,
        "straggler_rank": float(max(worst, key=lambda rank: worst[rank])) if worst else None,
    }
    if (budget := analysis.budget) is not None:
        if budget.steps:
            found["step_ms"] = budget.step_ms.value
        if budget.exposed is not None:
            found["exposed_ms"] = sum(part.ms.value for part in budget.exposed_parts)
            found["exposed_share"] = sum(part.share for part in budget.exposed_parts)
        if budget.steps:
            found |= dict.fromkeys(map(part_figure, budget.absent), 0.0)
            found |= {part_figure(part.name): part.ms.value for part in budget.parts}
    if communication is not None:
        found |= {"hidden_share": communication.hidden_share, "bus_gb_per_s": communication.bus_gb_per_s}
    return {name: value for name, value in found.items() if value is not None}
