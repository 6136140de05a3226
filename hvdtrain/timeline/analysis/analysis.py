"""What an analysis says: the one form that terminal, JSON, HTML and TensorBoard show. Times in milliseconds a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95% confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Part:
    """A part of a whole.

    Attributes:
        name: as shown.
        ms: a step.
        share: of the whole, 0 to 1.
    """

    name: str
    ms: Estimate
    share: float


@dataclass(frozen=True)
class Budget:
    """Where a step's wall time goes; the parts sum to it.

    Attributes:
        what: whose steps: "rank 0", "mean of 4 ranks", with their numbers where a run did others before; for a Timeline
            by itself "rank 0's communication".
        step_ms: wall time of a step.
        steps: how many were looked at; 0 where a Timeline's could not be told: then times are those of all of it.
        parts: data, forward, backward, exposed communication in its pieces (waiting for late ranks, negotiation, queue,
            fusion copies, transfer, other), optimizer, evaluations and checkpoints, rest; only those that are not 0.
        exposed: names of those parts that are exposed communication.
    """

    what: str
    step_ms: Estimate
    steps: int
    parts: Sequence[Part]
    exposed: Sequence[str]


@dataclass(frozen=True)
class Communication:
    """The exchange, hidden behind backward or not; None where nothing tells.

    Attributes:
        phases: negotiation, queue, fusion copies, transfer: milliseconds a step of each, overlapping ones counted once.
        busy_ms: a step, any of them.
        hidden_share: of `busy_ms`, what lies behind computing, 0 to 1.
        bytes_per_step: handed to collectives by a rank.
        bus_gb_per_s: bus bandwidth while transferring: what a rank has to send and take in of an allreduce,
            2 (n - 1) / n of its bytes, a second (NCCL's definition, in 1e9 bytes).
        link_gb_per_s: the same for a large allreduce alone, measured by a probe.
    """

    phases: Sequence[Part]
    busy_ms: float | None
    hidden_share: float | None
    bytes_per_step: float | None
    bus_gb_per_s: float | None
    link_gb_per_s: float | None


@dataclass(frozen=True)
class Carrier:
    """A bucket or tensor, by what it costs.

    Attributes:
        name: of the collective.
        modules: whose gradients it carries, by module name.
        nbytes: of one exchange.
        ms: a step, from the first rank being ready to the sum being there.
        exposed_ms: of it, what was not hidden.
    """

    name: str
    modules: Sequence[str]
    nbytes: int | None
    ms: float
    exposed_ms: float | None


@dataclass(frozen=True)
class Cause:
    """What is different about a late rank.

    Attributes:
        name: data, forward, backward, optimizer, gc, cpu (no core was free), steal, gpu clock, gpu throttle, experts.
        ms: a step more than the median of the others; None where it is no time.
        text: in plain words, with the numbers.
    """

    name: str
    ms: float | None
    text: str


@dataclass(frozen=True)
class RankRow:
    """One rank beside the others.

    Attributes:
        rank, host: which.
        last_share: of the steps in which it was the last to be ready, 0 to 1.
        cost_ms: what a step would be shorter by, were it like the others.
        parts_ms: mean milliseconds a step by part.
        clock_error_ms: by how much its times may be off rank 0's.
        behind_ms: by how much it is usually ready after the others: the median over steps, of the median of the others.
    """

    rank: int
    host: str
    last_share: float
    cost_ms: Estimate
    parts_ms: Mapping[str, float]
    clock_error_ms: float
    behind_ms: float = 0.0


@dataclass(frozen=True)
class Blame:
    """Which rank the others wait for.

    Attributes:
        source: stamps: our own, on every rank; ticks: Horovod's, of the steps in which it wrote them; none.
        steps: that were looked at.
        ranks: all of them, most costly first.
        late: ranks of which the evidence is not noise, most costly first.
        causes: of each late rank, largest first.
        reason: why nobody is named, where nobody is.
    """

    source: Literal["stamps", "ticks", "none"]
    steps: int
    ranks: Sequence[RankRow]
    late: Sequence[int]
    causes: Mapping[int, Sequence[Cause]]
    reason: str = ""


@dataclass(frozen=True)
class Finding:
    """One thing that a person should know.

    Attributes:
        kind: a short fixed name: straggler, exposed, input, gc, small_buckets, bandwidth, stall, ...
        text: a sentence in plain words with its number.
        cost_ms: a step, what is to be won at most; None where unknown. Findings are ordered by it.
        advice: what to do, with the flag to try.
    """

    kind: str
    text: str
    cost_ms: float | None
    advice: str


@dataclass(frozen=True)
class Slice:
    """A span in a lane: name, milliseconds from the first step shown, step."""

    name: str
    start_ms: float
    end_ms: float
    step: int


@dataclass(frozen=True)
class Lane:
    """One row of the picture.

    Attributes:
        label: "rank 3 on host", "rank 0, exchange", "Horovod".
        slices: beside or inside of each other, ordered by start.
    """

    label: str
    slices: Sequence[Slice]


@dataclass(frozen=True)
class Analysis:
    """Everything that is told of a run.

    Attributes:
        title: the run's name.
        size: ranks; 0 where nothing says.
        budget: None where no step was seen.
        communication: None where nothing tells.
        carriers: most costly first, ten at most.
        blame: of ranks.
        findings: most costly first.
        lanes: a few steps.
        warnings: lines of Horovod, NCCL and the run.
        notes: what is missing, what was dropped, how sure the clocks are.
    """

    title: str
    size: int
    budget: Budget | None
    communication: Communication | None
    carriers: Sequence[Carrier]
    blame: Blame
    findings: Sequence[Finding]
    lanes: Sequence[Lane] = ()
    warnings: Sequence[str] = ()
    notes: Sequence[str] = field(default=())


def figures(analysis: Analysis) -> dict[str, float]:
    """Numbers by name, as ``--fail_if`` and TensorBoard know them; only those that are known.

    step_ms, straggler_ms (0 where nobody is late), straggler_rank, exposed_ms, exposed_share, hidden_share,
    bus_gb_per_s, and PART_ms for each part of the budget (spaces as underscores).
    """
    found: dict[str, float] = {}
    if analysis.blame.source != "none":
        rows = {row.rank: row for row in analysis.blame.ranks}
        late = analysis.blame.late
        found["straggler_ms"] = rows[late[0]].cost_ms.value if late else 0.0
        if late:
            found["straggler_rank"] = float(late[0])
    if (budget := analysis.budget) is not None:
        if budget.steps:
            found["step_ms"] = budget.step_ms.value
        exposed = [part for part in budget.parts if part.name in budget.exposed]
        found["exposed_ms"] = sum(part.ms.value for part in exposed)
        found["exposed_share"] = sum(part.share for part in exposed)
        if budget.steps:
            found |= {f"{part.name.replace(' ', '_')}_ms": part.ms.value for part in budget.parts}
    if (communication := analysis.communication) is not None:
        for name in ("hidden_share", "bus_gb_per_s"):
            value = getattr(communication, name)
            if value is not None:
                found[name] = value
    return found
