"""The link that explains what was measured: of a probe where there is one, else of the run's waits. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from hvdtrain.compression.sizes import sent_bytes
from hvdtrain.compression.table import parse
from hvdtrain.errors import ConfigError
from hvdtrain.timeline.whatif.assemble import buckets_of
from hvdtrain.timeline.whatif.evidence import Evidence, Fitted
from hvdtrain.timeline.whatif.links import ONE_HOST, Link, Ranks, fit

NETWORK = Link(3e-5, math.nan, 2.5e-10)
"""Between hosts, where nothing was measured: messages over TCP in 30 us."""
_HOP_S = 3e-5
_OFF_PROBE, _OFF_WAITS, _OFF_TIMELINE, _OFF_HIDDEN = 0.1, 0.15, 0.3, 0.5
_HIDDEN = 0.3
"""Where less than this share of the exchange was waited for, the wait tells little of its speed."""
_UNEXPLAINED = 0.05
"""Of a step: what may be waited beyond what the probed link explains, before it is taken to have changed since."""
_FASTEST, _SLOWEST = 1e-12, 1e-4
_HALVINGS = 40


def fit_link(
    evidence: Evidence,
    probed: Sequence[tuple[int, float]],
    taken: Sequence[tuple[int, float]],
    exchange_cpu_s: float | None,
    wait_and_wire: Callable[[Evidence], tuple[float, float]],
) -> Fitted:
    """The link of a run.

    Args:
        evidence: of the run, without one.
        probed: bytes and seconds of allreduces that were measured by themselves.
        taken: of those of steps, by Horovod's Timeline.
        exchange_cpu_s: processor time of the threads that exchange, a step; None where nothing told.
        wait_and_wire: seconds that a step, replayed by an evidence, waits for gradients, and that they are on the way.
    """
    ranks = evidence.job.ranks
    if ranks.size == 1:
        return Fitted(None, "nothing was exchanged", 0.0)
    waited_s = max(0.0, evidence.parts_s["wait"] - evidence.late_s)
    slower = False
    sources = (probed, "probed at the run's start", _OFF_PROBE), (taken, "from Horovod's Timeline", _OFF_TIMELINE)
    for pairs, source, off in sources:
        if (found := fit(pairs, ranks)) is not None:
            link = _with_cpu(evidence, found, exchange_cpu_s)
            explained_s, _ = wait_and_wire(replace(evidence, fitted=Fitted(link, "", 0.0)))
            slower = ranks.hosts > 1 and waited_s > explained_s + _UNEXPLAINED * evidence.step_s
            if not slower:
                return Fitted(link, f"{source}: {_told(link)}", off)
    if ranks.hosts == 1:  # in memory, by the core that computes: what it takes of that is all that there is
        link = _with_cpu(evidence, ONE_HOST, exchange_cpu_s)
        link = replace(link, s_per_byte=link.cpu_s_per_byte)
        return Fitted(link, f"not measured; from processor time, or assumed: {_told(link)}", _OFF_HIDDEN)

    def at(s_per_byte: float) -> tuple[Link, float, float]:
        link = _with_cpu(evidence, Link(_HOP_S, s_per_byte), exchange_cpu_s)
        return link, *wait_and_wire(replace(evidence, fitted=Fitted(link, "", 0.0)))

    low, high = _FASTEST, _SLOWEST
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if at(middle)[1] < waited_s else (low, middle)
    link, wait_s, wire_s = at((low * high) ** 0.5)
    told = wait_s > _HIDDEN * wire_s
    source = "from what the run's steps waited for gradients" + ("" if told else ", little of the exchange")
    source += ", as it was slower than when it was probed" if slower else ""
    return Fitted(link, f"{source}: {_told(link)}", _OFF_WAITS if told else _OFF_HIDDEN)


def known_link(evidence: Evidence, ranks: Ranks, gbit: float | None) -> tuple[Link, float, str]:
    """What is known of the link between so many ranks: itself, by how much its speed may be off, where it is from.

    Args:
        evidence: of the run.
        ranks: that are to be.
        gbit: what was asked for in its place.

    Errors:
        ConfigError: nothing is known of it.
    """
    fitted = evidence.fitted
    if ranks.size == 1:
        return Link(0.0, 0.0), 0.0, "none"
    if ranks.hosts == 1 and gbit is not None:
        raise ConfigError(
            "--bandwidth_gbit is that of a link between hosts, and there is one host",
            found=f"{ranks.size} rank(s), {ranks.per_host} on a host",
            next_step="say on how many hosts: --ranks_per_host 1",
        )
    if fitted.link is not None and (ranks.hosts > 1) == (evidence.job.ranks.hosts > 1):
        return fitted.link, fitted.off, fitted.source
    if ranks.hosts == 1:
        return ONE_HOST, 0.7, "assumed, as nothing was exchanged on one host: 4 GB/s"
    if gbit is None:
        raise ConfigError(
            f"{ranks.size} ranks at {ranks.per_host} a host are on {ranks.hosts} hosts, and nothing is known of the"
            " link between them: the run had one host",
            next_step="say how fast it is: --bandwidth_gbit 10; or that there is one host: --ranks_per_host"
            f" {ranks.size}",
        )
    return NETWORK, 0.0, "as asked; small messages take 30 us where --latency_us does not say otherwise"


def _with_cpu(evidence: Evidence, link: Link, exchange_cpu_s: float | None) -> Link:
    """With what the exchange takes of a core: no more than all of the time that bytes are on their way."""
    compression, ranks = parse(evidence.job.compression), evidence.job.ranks
    sent = sum(
        sent_bytes({kind: math.ceil(size)}, ranks.size)
        for bucket in buckets_of(evidence, evidence.job)
        for kind, size in bucket.collectives(compression, ranks.size)
    )
    if exchange_cpu_s is None or not sent:
        return replace(link, cpu_s_per_byte=link.s_per_byte if ranks.hosts == 1 else 0.0)
    return replace(link, cpu_s_per_byte=min(exchange_cpu_s / sent, link.s_per_byte))


def _told(link: Link) -> str:
    return f"{8e-9 / link.s_per_byte:.3g} Gbit/s, {link.hop_s * 1e6:.0f} us a small message"
