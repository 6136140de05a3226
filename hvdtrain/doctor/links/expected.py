"""Predict step times on more ranks and hosts, by what-if with the measured links. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hvdtrain.compression.table import auto_candidates
from hvdtrain.doctor.links.measured import Direction, Links, aligned, gbit, microseconds
from hvdtrain.errors import ConfigError
from hvdtrain.plan.gradients import Gradient, spread_evenly
from hvdtrain.plan.plan import Plan, Ranks
from hvdtrain.timeline.whatif.evidence import Change, Evidence, FittedLink, Job
from hvdtrain.timeline.whatif.links import ETHERNET, ONE_HOST, Link
from hvdtrain.timeline.whatif.predict import predict
from hvdtrain.timeline.whatif.prediction_text import UNKNOWN

COMPRESSIONS = ("none", *auto_candidates())
_MULTIPLES = (2, 4, 8)  # multiples of the measured number of hosts
_LAYERS = 32
_BACKWARD = 2 / 3  # part of a step: backward computes two matrix products for each one of forward
_OFF = 0.1


@dataclass(frozen=True)
class Prediction:
    """The prediction for a number of ranks."""

    ranks: Ranks  # number of ranks, and ranks per host
    step_s: Mapping[str, float]  # step time by compression
    efficiency: Mapping[str, float]  # speed of a rank relative to a single rank, by compression
    beyond: bool  # whether it has more hosts than were measured


@dataclass(frozen=True)
class Outlook:
    """A table of predictions, and its assumptions."""

    rows: Sequence[Prediction]
    notes: Sequence[str]

    def lines(self) -> list[str]:
        """Return the table as plain lines."""
        names = list(self.rows[0].step_s)
        rows = [["hosts", "ranks", *names]]
        for row in self.rows:
            cells = [f"{_ms(row.step_s[name])} {row.efficiency[name]:4.0%}" for name in names]
            rows.append([f"{row.ranks.hosts}{'*' if row.beyond else ''}", str(row.ranks.size), *cells])
        text = ["predicted step time and efficiency, by --parallel.compression:", *aligned(rows)]
        if any(row.beyond for row in self.rows):
            text.append("  * more hosts than were measured")
        return text + [f"- {note}" for note in self.notes]


def assumed_run(parameters: int, step_s: float, cores: int, threads: int, *, on_cpu: bool) -> Evidence:
    """Return assumed evidence for a model of N fp32 parameters without a recorded run.

    ``step_s`` is the step time of a single rank, ``cores`` are those of a host, ``threads`` compute for a rank.
    """
    layers = max(1, min(_LAYERS, parameters // 1024))
    each = parameters / layers
    side = max(1, math.isqrt(int(each)))
    shape = (max(1, round(each / side)), side)
    backward_s = _BACKWARD * step_s
    gradients = spread_evenly([Gradient(f"layer{i}", shape) for i in range(layers)], backward_s)
    parts = dict.fromkeys(("data", "copy", "wait", "clip", "optimizer", "rest"), 0.0)
    return Evidence(
        job=Job(Ranks(1, 1), Plan(), 1, 1),
        cores=cores,
        own_cores=cores,
        threads=threads,
        on_cpu=on_cpu,
        gradients=gradients[::-1],
        step_s=step_s,
        parts_s={**parts, "forward": step_s - backward_s, "backward": backward_s},
        notes=[
            f"assumed model: {parameters:,} fp32 parameters in {layers} gradients of equal size, computed one after "
            f"another; backward takes two thirds of {step_s * 1e3:g} ms; all ranks are equally fast. --run RUN "
            "uses the measurements of a run instead"
        ],
    )


def outlook(evidence: Evidence, links: Links, per_host: int) -> Outlook:
    """Predict the step time by number of ranks and compression. Each rank has the work of a single one.

    Errors: ConfigError if the ranks of the run divide the model, so that a single one has none of it whole.
    """
    if dimensions := evidence.job.plan.dimensions:
        raise ConfigError(
            f"{evidence.path} cannot be used here: a run with {dimensions.options} says nothing about single ranks",
            expected="a run in which each rank computes with the whole model",
            next_step=f"hvdtrain timeline whatif {evidence.path} --size N predicts such ranks",
        )
    job, between = evidence.job, _slowest(links.between)
    notes = [
        "each rank keeps its work, so the global batch grows with the ranks; efficiency compares with a single rank",
        *evidence.notes,
    ]
    if job.ranks.size == 1 and (inside := _slowest(links.inside)):  # but not faster than ranks can sum
        s_per_byte = max(ONE_HOST.s_per_byte, inside.s_per_byte)
        inside = Link(inside.hop_s, s_per_byte, s_per_byte)
        evidence = replace(evidence, fitted=FittedLink(inside, "measured", _OFF))
        notes.append(f"within a host: {_link_text(inside)}; limited by the speed of summing gradients")
    slowest = (
        f"{_link_text(between)}, the slowest of all ways by {links.by}; ranks of a host share it" if between else ""
    )
    notes.append(f"between hosts: {slowest or 'not measured: hvdtrain doctor --hosts a,b --probe'}")
    if per_host > job.ranks.per_host:
        notes.append("more ranks on a host than were measured: that they share its memory's speed is not in the model")
    if job.ranks.size > 1:
        notes.append(f"how late the slowest rank is: from the run's {job.ranks.size} ranks, beyond extrapolated")
    notes.append("compression cost is from another machine; measure it with: hvdtrain timeline whatif RUN --probe")
    work = job.micro_batch * job.passes

    def step_s(ranks: Ranks, compression: str) -> float:
        change = Change(
            ranks.size,
            ranks.per_host,
            compression=compression,
            global_batch=work * ranks.size,
            shard="none",
            engine="horovod",
        )
        if ranks.hosts > 1:
            assert between is not None
            gbits, latency_us = 8e-9 / between.s_per_byte / ETHERNET, between.hop_s * 1e6
            change = replace(change, bandwidth_gbit=gbits, latency_us=latency_us)
        return predict(evidence, change).then.step_s

    alone_s = step_s(Ranks(1, 1), "none")
    rows = []
    for ranks in _sizes(len(links.hosts), per_host, several=between is not None):
        steps = {name: step_s(ranks, name) if ranks.size > 1 else alone_s for name in COMPRESSIONS}
        efficiency = {name: alone_s / seconds for name, seconds in steps.items()}
        rows.append(Prediction(ranks, steps, efficiency, ranks.hosts > len(links.hosts)))
    return Outlook(rows, [*notes, f"not in the model: {'; '.join(UNKNOWN)}"])


def _slowest(ways: Sequence[Direction]) -> Link | None:
    """Return the link that limits an allreduce over these ways."""
    if not ways:
        return None
    return Link(max(one.latency_s for one in ways), max(1 / one.bytes_per_s for one in ways))


def _link_text(link: Link) -> str:
    return f"{gbit(8e-9 / link.s_per_byte)}, {microseconds(link.hop_s)} per small message"


def _sizes(hosts: int, per_host: int, *, several: bool) -> Iterator[Ranks]:
    """Yield one rank, one host, and growing numbers of hosts up to several times the measured ones."""
    yield Ranks(1, 1)
    if per_host > 1:
        yield Ranks(per_host, per_host)
    if several:
        doubling = [1 << power for power in range(1, hosts.bit_length()) if 1 << power < hosts]
        for count in [*doubling, hosts, *(hosts * times for times in _MULTIPLES)]:
            yield Ranks(count * per_host, per_host)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"
