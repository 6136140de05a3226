"""Find the link that explains a run's measurements: from a probe, or from how long steps waited. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from statistics import fmean

from hvdtrain.compression.sizes import sent_bytes
from hvdtrain.errors import ConfigError
from hvdtrain.plan.collectives import sums
from hvdtrain.plan.plan import Ranks
from hvdtrain.timeline.whatif.evidence import Evidence, FittedLink, Job
from hvdtrain.timeline.whatif.links import ONE_HOST, Link, fit_allreduces

NETWORK = Link(3e-5, math.nan, 2.5e-10)
"""Between hosts, if nothing was measured: 30 us for a small message over TCP."""
GLOO_ONE_HOST = Link(1e-4, 7e-10, 7e-10)
"""Between ranks of one host by Gloo, if it was not measured: 33.5 MB were summed over two ranks in 23 ms."""
_HOP_S = 3e-5
_PROBE_UNCERTAINTY, _WAITS_UNCERTAINTY, _GLOO_UNCERTAINTY, _HIDDEN_UNCERTAINTY = 0.1, 0.15, 0.3, 0.5
_HIDDEN = 0.3
"""If less than this share of the exchange was waited for, the wait says little about the link's speed."""
_UNEXPLAINED = 0.05
"""Share of a step. If steps waited longer than the probed link explains by more than this, the link has changed."""
_FEW_SIZES = 3
_FASTEST, _SLOWEST = 1e-12, 1e-4
_HALVINGS = 40


def fit_link(
    evidence: Evidence,
    probed: Sequence[tuple[int, float]],
    exchange_cpu_s: float | None,
    wait_and_wire: Callable[[Evidence], tuple[float, float]],
) -> FittedLink:
    """Return the link of a run.

    Args:
        evidence: of the run, without a link.
        probed: bytes and seconds of allreduces that were measured on their own.
        exchange_cpu_s: processor time per step of the threads that exchange; None if unknown.
        wait_and_wire: replays a step and returns the seconds that it waits and that the exchange takes.
    """
    ranks = evidence.job.ranks
    if ranks.size == 1:
        return FittedLink(None, "nothing was exchanged", 0.0)
    exchanges = bool(evidence.buckets_of(evidence.job))
    waited_s = max(0.0, evidence.parts_s["wait"] - evidence.late_s)
    slower = False

    def replayed(link: Link) -> tuple[Link, float, float]:
        """Return the link with its processor time, and the seconds that a step waits and exchanges over it."""
        link = _with_cpu(evidence, link, exchange_cpu_s)
        return link, *wait_and_wire(replace(evidence, fitted=FittedLink(link, "", 0.0)))

    if (found := fit_allreduces(probed, ranks)) is not None:
        link, explained_s, _ = replayed(found)
        exact = evidence.compression_of(evidence.job.plan.compression).exact  # else a wait may be for coding
        shows_links = exact and exchanges and ranks.hosts > 1
        slower = shows_links and waited_s > explained_s + _UNEXPLAINED * evidence.step_s
        if not slower:
            uncertainty = max(_PROBE_UNCERTAINTY, _spread(probed, ranks))
            return FittedLink(link, f"probed at the run's start: {_text(link, uncertainty)}", uncertainty)
    if ranks.hosts == 1:  # bytes are copied by the core that computes: its processor time is all that is known
        link = _with_cpu(evidence, ONE_HOST, exchange_cpu_s)
        link = replace(link, s_per_byte=link.cpu_s_per_byte)
        return FittedLink(link, f"not measured; from processor time, or assumed: {_text(link)}", _HIDDEN_UNCERTAINTY)
    if not exchanges:  # the only rank with its part of the model
        return FittedLink(None, "nothing was exchanged", 0.0)
    low, high = _FASTEST, _SLOWEST
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if replayed(Link(_HOP_S, middle))[1] < waited_s else (low, middle)
    link, wait_s, wire_s = replayed(Link(_HOP_S, (low * high) ** 0.5))
    exposed = wait_s > _HIDDEN * wire_s
    source = "from the time that steps waited for gradients" + ("" if exposed else ", a small part of the exchange")
    source += ", because it was slower than when it was probed" if slower else ""
    return FittedLink(link, f"{source}: {_text(link)}", _WAITS_UNCERTAINTY if exposed else _HIDDEN_UNCERTAINTY)


def fit_probed_link(evidence: Evidence, probed: Sequence[tuple[int, float]]) -> FittedLink:
    """Return the link of allreduces that were measured on their own; an assumed one if there are too few."""
    ranks = evidence.job.ranks
    found = fit_allreduces(probed, ranks) or ONE_HOST
    return FittedLink(_with_cpu(evidence, found, None), "probed", max(_PROBE_UNCERTAINTY, _spread(probed, ranks)))


def _spread(pairs: Sequence[tuple[int, float]], ranks: Ranks) -> float:
    """Return half of the 95% interval of a fitted bandwidth, as a share; 0 from too few sizes. By the jackknife.

    Quenouille, "Notes on bias in estimation", 1956; the sizes are the observations.
    """
    sizes = sorted({size for size, seconds in pairs if seconds > 0})
    without = [fit_allreduces([pair for pair in pairs if pair[0] != size], ranks) for size in sizes[1:]]
    found = [1 / link.s_per_byte for link in without if link is not None]
    if len(found) < _FEW_SIZES:
        return 0.0
    mean = fmean(found)
    error = math.sqrt((len(found) - 1) / len(found) * sum((each - mean) ** 2 for each in found))
    return min(1.0, 1.96 * error / mean)


def link_between(evidence: Evidence, job: Job, gbit: float | None) -> FittedLink:
    """Return what is known about the link between the ranks of a job, which the user may give as `gbit` instead.

    Errors: ConfigError: nothing is known about it.
    """
    fitted, ranks = evidence.fitted, job.ranks
    if ranks.size == 1 or (job.plan.dimensions.divides_model and not evidence.buckets_of(job)):
        return FittedLink(Link(0.0, 0.0), "none", 0.0)
    if ranks.hosts == 1 and gbit is not None:
        raise ConfigError(
            "--bandwidth_gbit is the bandwidth between hosts, but there is one host",
            found=f"{ranks.size} rank(s), {ranks.per_host} on a host",
            next_step="set the number of ranks on each host: --ranks_per_host 1",
        )
    if fitted.link is not None and (ranks.hosts > 1) == (evidence.job.ranks.hosts > 1):
        return _by_engine(evidence, job, fitted)
    if ranks.hosts == 1:
        assumed = FittedLink(ONE_HOST, "assumed to be 4 GB/s, because nothing was exchanged on one host", 0.7)
        return _by_engine(evidence, job, assumed)
    if gbit is None:
        raise ConfigError(
            f"the link between {ranks.hosts} hosts is unknown: the run has exchanged nothing between hosts",
            expected=f"its bandwidth: {ranks.size} ranks with {ranks.per_host} on a host need {ranks.hosts} hosts",
            next_step="set its bandwidth: --bandwidth_gbit 10; or use one host: --ranks_per_host"
            f" {ranks.size}, of hvdtrain plan --hosts 1",
        )
    return FittedLink(NETWORK, "as given; small messages take 30 us unless --latency_us is given", 0.0)


def _by_engine(evidence: Evidence, job: Job, fitted: FittedLink) -> FittedLink:
    """Return the link as an engine uses it: DDP communicates by Gloo on CPUs, which was not measured."""
    if job.plan.engine != "ddp" or not evidence.on_cpu or fitted.link is None:
        return fitted
    if job.ranks.hosts > 1:
        return replace(fitted, uncertainty=max(fitted.uncertainty, _GLOO_UNCERTAINTY))
    pairs = zip(astuple(fitted.link), astuple(GLOO_ONE_HOST), strict=True)
    link = Link(*(max(pair) for pair in pairs))
    return FittedLink(link, f"Gloo's, which was not measured; assumed: {_text(link)}", _HIDDEN_UNCERTAINTY)


def _with_cpu(evidence: Evidence, link: Link, exchange_cpu_s: float | None) -> Link:
    """Return the link with the processor time that the exchange takes: at most the time that it takes in all."""
    plan, ranks = evidence.job.plan, evidence.job.ranks
    sent = sum(
        sent_bytes({kind: math.ceil(size)}, plan.summing(ranks, bucket.summed_by).size)
        for bucket in evidence.buckets_of(evidence.job)
        for kind, size in sums(plan, bucket, ranks, evidence.compression_of(plan.compression))
    )
    if exchange_cpu_s is None or not sent:
        return replace(link, cpu_s_per_byte=link.s_per_byte if ranks.hosts == 1 else 0.0)
    return replace(link, cpu_s_per_byte=min(exchange_cpu_s / sent, link.s_per_byte))


def _text(link: Link, uncertainty: float = 0.0) -> str:
    gbit = 8e-9 / link.s_per_byte
    interval = f" [{gbit * (1 - uncertainty):.3g} .. {gbit * (1 + uncertainty):.3g}]" if uncertainty else ""
    return f"{gbit:.3g} Gbit/s{interval}, {link.hop_s * 1e6:.0f} us for a small message"
