"""What steps would take on more ranks and hosts, by the links that were measured: what-if, asked in a row. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hvdtrain.compression.table import auto_candidates
from hvdtrain.doctor.links.measured import Links, gbit, microseconds
from hvdtrain.timeline.whatif.bucket_plan import Gradient, spread_evenly
from hvdtrain.timeline.whatif.change import Change
from hvdtrain.timeline.whatif.evidence import Evidence, FittedLink, Job
from hvdtrain.timeline.whatif.links import ETHERNET, ONE_HOST, Link, Ranks
from hvdtrain.timeline.whatif.predict import predict
from hvdtrain.timeline.whatif.prediction_text import UNKNOWN

COMPRESSIONS = ("none", *auto_candidates())
_FURTHER = (2, 4, 8)
"""Times as many hosts as were measured."""
_LAYERS = 32
_BACKWARD = 2 / 3
"""Of a step: going back costs two products of matrices for each one of going forward."""
_OFF = 0.1


@dataclass(frozen=True)
class Expected:
    """A number of ranks.

    Attributes:
        ranks: how many, and how many of them on a host.
        step_s: of a step, by compression.
        efficiency: a rank's speed beside that of one alone, by compression.
        beyond: whether there are more hosts than were measured.
    """

    ranks: Ranks
    step_s: Mapping[str, float]
    efficiency: Mapping[str, float]
    beyond: bool


@dataclass(frozen=True)
class Outlook:
    """The table, and what it rests on."""

    rows: Sequence[Expected]
    notes: Sequence[str]

    def as_data(self) -> dict[str, Any]:
        """The same for programs."""
        return {"rows": [asdict(row) for row in self.rows], "notes": list(self.notes)}


def of_model(parameters: int, step_s: float, cores: int, threads: int, *, on_cpu: bool) -> Evidence:
    """What is known of a model of which nobody has a run.

    Args:
        parameters: how many, in fp32.
        step_s: of one rank, computing alone.
        cores: of a host.
        threads: that a rank computes with.
        on_cpu: whether it computes there.
    """
    layers = max(1, min(_LAYERS, parameters // 1024))
    each = parameters / layers
    side = max(1, math.isqrt(int(each)))
    shape = (max(1, round(each / side)), side)
    backward_s = _BACKWARD * step_s
    gradients = spread_evenly([Gradient(f"layer{i}", shape) for i in range(layers)], backward_s)
    parts = dict.fromkeys(("data", "copy", "wait", "clip", "optimizer", "rest"), 0.0)
    return Evidence(
        job=Job(Ranks(1, 1), "none", None, 1, 1),
        cores=cores,
        own_cores=cores,
        threads=threads,
        on_cpu=on_cpu,
        gradients=gradients,
        step_s=step_s,
        parts_s={**parts, "forward": step_s - backward_s, "backward": backward_s},
        notes=[
            f"the model: {parameters:,} parameters in fp32, in {layers} gradients of one size that backward has one "
            f"after another; backward is two thirds of {step_s * 1e3:g} ms; all ranks are equally fast: --run RUN "
            "takes all of it from a run"
        ],
    )


def outlook(evidence: Evidence, links: Links, per_host: int, compressions: Sequence[str] = COMPRESSIONS) -> Outlook:
    """Predict a step by ranks, each with the work of one, and by compression.

    Args:
        evidence: of a run, or `of_model`.
        links: as measured.
        per_host: ranks on a host.
        compressions: as options name them.
    """
    inside, between = _inside(evidence, links), _between(links)
    if inside is not None:
        evidence = replace(evidence, fitted=FittedLink(inside, "measured", _OFF))
    work = evidence.job.micro_batch * evidence.job.passes

    def step_s(ranks: Ranks, compression: str) -> float:
        change = Change(ranks.size, ranks.per_host, compression=compression, global_batch=work * ranks.size)
        if ranks.hosts > 1:
            assert between is not None
            gbits, latency_us = 8e-9 / between.s_per_byte / ETHERNET, between.hop_s * 1e6
            change = replace(change, bandwidth_gbit=gbits, latency_us=latency_us)
        return predict(evidence, change).then.step_s

    alone_s = step_s(Ranks(1, 1), "none")
    rows = []
    for ranks in _sizes(len(links.hosts), per_host, several=between is not None):
        steps = {name: step_s(ranks, name) if ranks.size > 1 else alone_s for name in compressions}
        efficiency = {name: alone_s / taken_s for name, taken_s in steps.items()}
        rows.append(Expected(ranks, steps, efficiency, ranks.hosts > len(links.hosts)))
    return Outlook(rows, _notes(evidence, links, per_host, inside, between))


def _inside(evidence: Evidence, links: Links) -> Link | None:
    """What ranks of a host exchange by, where the run has not told: as measured, but not faster than they can sum."""
    if evidence.job.ranks.size > 1 or not links.inside:
        return None
    s_per_byte = max(ONE_HOST.s_per_byte, *(1 / way.bytes_per_s for way in links.inside))
    return Link(max(way.latency_s for way in links.inside), s_per_byte, s_per_byte)


def _between(links: Links) -> Link | None:
    """The slowest link between hosts: an allreduce is as fast as that."""
    if not links.between:
        return None
    slowest = min(way.bytes_per_s for way in links.between)
    return Link(max(way.latency_s for way in links.between), 1 / slowest)


def _notes(evidence: Evidence, links: Links, per_host: int, inside: Link | None, between: Link | None) -> Sequence[str]:
    found = [
        "a rank's work stays, so the global batch grows with the ranks; efficiency is its speed beside one alone",
        *evidence.notes,
    ]
    if inside is not None:
        found.append(f"within a host: {_told(inside)}; not faster than gradients are summed")
    if between is None:
        found.append("between hosts: nothing was measured: hvdtrain doctor --hosts a,b --probe")
    else:
        found.append(
            f"between hosts: {_told(between)}, the slowest of all ways by {links.by}; ranks of a host share it"
        )
    if per_host > evidence.job.ranks.per_host:
        found.append("more ranks on a host than were measured: that they share its memory's speed is not in the model")
    if evidence.job.ranks.size > 1:
        found.append(
            f"how late the slowest rank is: from the run's {evidence.job.ranks.size} ranks, beyond extrapolated"
        )
    found.append("what coding costs is by a table of another machine: hvdtrain timeline whatif RUN --probe measures it")
    return [*found, f"not in the model: {'; '.join(UNKNOWN)}"]


def _told(link: Link) -> str:
    return f"{gbit(8e-9 / link.s_per_byte)}, {microseconds(link.hop_s)} a small message"


def _sizes(hosts: int, per_host: int, *, several: bool) -> Iterator[Ranks]:
    """One rank, one host, and hosts by twos up to several times those that there are."""
    yield Ranks(1, 1)
    if per_host > 1:
        yield Ranks(per_host, per_host)
    if several:
        doubling = [1 << power for power in range(1, hosts.bit_length()) if 1 << power < hosts]
        for count in [*doubling, hosts, *(hosts * times for times in _FURTHER)]:
            yield Ranks(count * per_host, per_host)


def lines(found: Outlook) -> list[str]:
    """The table in words."""
    names = list(found.rows[0].step_s)
    rows = [["hosts", "ranks", *names]]
    for row in found.rows:
        cells = [f"{_ms(row.step_s[name])} {row.efficiency[name]:4.0%}" for name in names]
        rows.append([f"{row.ranks.hosts}{'*' if row.beyond else ''}", str(row.ranks.size), *cells])
    wide = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    told = ["a step to expect, and the efficiency, by --parallel.compression:"]
    told += ["  " + "  ".join(cell.rjust(size) for cell, size in zip(row, wide, strict=True)) for row in rows]
    if any(row.beyond for row in found.rows):
        told.append("  * more hosts than were measured")
    return told + [f"- {note}" for note in found.notes]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"
