"""The hosts of a job as ``hvdtrain preflight`` finds them: which are bad, and a table. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from hvdtrain.doctor.links.measured import aligned

_WIDTH = 80
_MOST_HOSTS = 32  # rows of the table; with more hosts, the slowest are shown
_LONGEST_NAME = 22
_SKEW_S = 1.0  # difference of a host's clock from the median that is reported


@dataclass(frozen=True)
class HostCheck:
    """One host of the job; speeds are bus bandwidths in bytes per second, None if they were not measured."""

    host: str
    ranks: int
    gpus: int = 0  # different GPUs that its ranks see
    models: tuple[str, ...] = ()  # of these GPUs
    free_bytes: int = 0  # memory of the host
    gpu_free_bytes: int | None = None  # memory of the GPU that has the least
    skew_s: float = 0.0  # its clock, from the median of all
    inside: float | None = None
    between: float | None = None
    fabric: str = ""  # what NCCL uses between hosts
    remarks: tuple[str, ...] = ()  # what is unusual and does not make it bad


@dataclass(frozen=True)
class Preflight:
    """All hosts, and which are bad.

    Attributes:
        hosts: in the order of their ranks.
        bad: the reasons by host.
        by: what carried the allreduces: ``NCCL``, ``MPI, on CPUs`` ...
        everyone: bus bandwidth of all ranks in bytes per second.
        notes: about the job.
    """

    hosts: tuple[HostCheck, ...]
    bad: Mapping[str, tuple[str, ...]]
    by: str
    everyone: float | None = None
    notes: tuple[str, ...] = field(default=())

    def as_data(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)


def bad_hosts(hosts: Sequence[HostCheck], gpus: int, least: float) -> dict[str, tuple[str, ...]]:
    """Return the bad hosts with the reasons.

    A host is bad if it has fewer GPUs than `gpus`, or if a bandwidth is below `least` times the median of the hosts. Of
    one or two hosts, no bandwidth is bad: with two, both share the link, and there is no third to compare with.
    """
    found: dict[str, list[str]] = {}
    for host in hosts:
        if host.gpus < gpus:
            found.setdefault(host.host, []).append(f"{host.gpus} of {gpus} GPUs")
    for name, what in (("inside", "within the host"), ("between", "between hosts")):
        speeds = {host.host: speed for host in hosts if (speed := getattr(host, name)) is not None}
        if len(speeds) < 3:
            continue
        usual = median(speeds.values())
        for slow, speed in speeds.items():
            if speed < least * usual:
                text = f"{gigabytes(speed)} GB/s {what}; the median is {gigabytes(usual)}"
                found.setdefault(slow, []).append(text)
    return {host: tuple(reasons) for host, reasons in found.items()}


def remarks_of(host: HostCheck) -> list[str]:
    """Return what is unusual on a host, and does not make it bad."""
    found = list(host.remarks)
    if abs(host.skew_s) > _SKEW_S:
        found.append(f"its clock differs by {host.skew_s:+.1f} s from the others")
    return found


def unanswered(ranks: Mapping[int, bool], hosts: Sequence[str]) -> list[str]:
    """Return the hosts that did not answer by the deadline; none where that is unknown.

    These are the hosts of silent ranks; without any, those of ranks that wait in a measurement which others finished.

    Args:
        ranks: those that still report, and whether each waits in a measurement.
        hosts: of each rank.
    """
    silent = [rank for rank in range(len(hosts)) if rank not in ranks]
    stuck = silent or [rank for rank, waits in ranks.items() if waits]
    return list(dict.fromkeys(hosts[rank] for rank in stuck)) if len(stuck) < len(hosts) else []


def lines(found: Preflight) -> list[str]:
    """Return the report, 80 columns wide."""
    shown = _shown(found)
    rows = [["host", "ranks", "GPUs", "free GiB", "in host GB/s", "between GB/s", ""]]
    for host in shown:
        free = f"{host.free_bytes / 2**30:.0f}"
        speeds = [gigabytes(host.inside), gigabytes(host.between)]
        rows.append([_short(host.host), f"{host.ranks}", f"{host.gpus}", free, *speeds, _mark(found, host)])
    text = [line.rstrip() for line in aligned(rows)]
    if len(shown) < len(found.hosts):
        text.append(f"  and {len(found.hosts) - len(shown)} faster hosts")
    if found.everyone is not None:
        text += _wrapped(f"all {sum(host.ranks for host in found.hosts)} ranks: {gigabytes(found.everyone)} GB/s")
    text += _wrapped(f"bus bandwidth of allreduces over {found.by}")
    for fabric in dict.fromkeys(host.fabric for host in found.hosts if host.fabric):
        users = [host.host for host in found.hosts if host.fabric == fabric]
        text += _wrapped(f"NCCL uses {fabric}: {len(users)} of {len(found.hosts)} hosts")
    for note in found.notes:
        text += _wrapped(note)
    for host in shown:
        text += [line for remark in remarks_of(host) for line in _wrapped(f"{host.host}: {remark}")]
    for name, reasons in found.bad.items():
        text += _wrapped(f"bad host {name}: {'; '.join(reasons)}")
    return [*text, f"{len(found.bad)} of {len(found.hosts)} hosts are bad" if found.bad else "no bad host"]


def gigabytes(bytes_per_s: float | None) -> str:
    """Format a bandwidth in GB/s."""
    return "-" if bytes_per_s is None else f"{bytes_per_s * 1e-9:.3g}"


def _shown(found: Preflight) -> list[HostCheck]:
    if len(found.hosts) <= _MOST_HOSTS:
        return list(found.hosts)
    return sorted(found.hosts, key=lambda host: (host.host not in found.bad, host.between or 0.0))[:_MOST_HOSTS]


def _mark(found: Preflight, host: HostCheck) -> str:
    return "BAD" if host.host in found.bad else "ok"


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}..."


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
