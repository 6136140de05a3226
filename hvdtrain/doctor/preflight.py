"""The hosts of a job as ``hvdtrain preflight`` finds them: which are bad, their network; the deadline of the ranks."""

from __future__ import annotations

import json
import re
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from hvdtrain.timeline.logs import NcclLines
from hvdtrain.timeline.whatif.links import ETHERNET

if TYPE_CHECKING:
    from torch.distributed import Store

    from hvdtrain.comm.link_probe import HostSpeeds

_WIDTH = 80
_MOST_HOSTS = 32  # rows of the table; with more hosts, the slowest are shown
_LONGEST_NAME = 22
_SKEW_S = 1.0  # difference of a host's clock from the median that is reported

_NAME = re.compile(r"(?:\[\d+\])?([A-Za-z][\w.-]*):[\d.a-fA-F:]+<")
_CARD = re.compile(r"\[\d+\]([\w.-]+):\d+/(?:IB|RoCE|uverbs)")
_CHANNEL = re.compile(r"(P2P|SHM)\b|NET/([^/]+)")

_EVERY_S = 0.5
_LISTEN_S = 3.0  # at the deadline, rank 0 waits this long for further reports
_OTHERS_S = 10.0  # the other ranks end this much later, so that a launcher does not end rank 0 before it has reported


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
    """All hosts, and which are bad."""

    hosts: tuple[HostCheck, ...]  # in the order of their ranks
    bad: Mapping[str, tuple[str, ...]]  # the reasons by host
    by: str  # what carried the allreduces: ``NCCL``, ``MPI, on CPUs`` ...
    everyone: float | None = None  # bus bandwidth of all ranks in bytes per second
    notes: tuple[str, ...] = ()  # about the job


def host_checks(facts: Sequence[Mapping[str, Any]], speeds: HostSpeeds) -> tuple[HostCheck, ...]:
    """Return the hosts. `facts`: of each rank; those that begin with `clock_s` are known after the measurement."""
    clock_s = median(fact.get("clock_s", 0.0) for fact in facts)
    found = []
    for host in dict.fromkeys(str(fact["host"]) for fact in facts):
        mine = [fact for fact in facts if fact["host"] == host]
        gpus = {uuid: model for fact in mine for uuid, model in fact["gpus"].items()}
        free = [fact["gpu_free_bytes"] for fact in mine if fact.get("gpu_free_bytes") is not None]
        found.append(
            HostCheck(
                host,
                ranks=len(mine),
                gpus=len(gpus),
                models=tuple(gpus.values()),
                free_bytes=min(fact["free_bytes"] for fact in mine),
                gpu_free_bytes=min(free, default=None),
                skew_s=median(fact.get("clock_s", 0.0) for fact in mine) - clock_s,
                inside=speeds.inside.get(host),
                between=speeds.between.get(host),
                fabric="; ".join(dict.fromkeys(fact["fabric"] for fact in mine if fact.get("fabric"))),
                remarks=tuple(dict.fromkeys(remark for fact in mine for remark in fact.get("remarks", ()))),
            )
        )
    return tuple(found)


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


def fabric(lines: Iterable[str], cards: Iterable[str] = ()) -> str:
    """Describe what NCCL uses, such as ``NET/IB mlx5_0``; "" if the log does not show it. `cards`: of this host."""
    log = NcclLines()
    for line in lines:
        log.add_line(line)
    links = [kind for _, _, via in log.facts["link"] if (kind := _CHANNEL.match(via))]
    kinds = dict.fromkeys(kind[1] or f"NET/{kind[2].strip()}" for kind in links)
    addresses = [values[-1] for kind in ("bootstrap", "device") for values in log.facts[kind]]
    used = {
        "NET/IB": dict.fromkeys(card for _, text in log.facts["device"] for card in _CARD.findall(text)),
        "NET/Socket": dict.fromkeys(name for text in addresses for name in _NAME.findall(text)),
    }
    between = [kind for kind in kinds if kind.startswith("NET/")]
    text = ", ".join(" ".join([kind, *used.get(kind, ())]) for kind in between or kinds)
    unused = ", ".join(cards)
    return f"{text} (although there are {unused})" if "NET/Socket" in kinds and unused else text


def unanswered(ranks: Mapping[int, bool], hosts: Sequence[str]) -> list[str]:
    """Return the hosts that did not answer by the deadline; none where that is unknown.

    These are the hosts of silent ranks; without any, those of ranks that wait in a measurement which others finished.
    `ranks`: those that still report, and whether each waits in a measurement; `hosts`: of each rank.
    """
    silent = [rank for rank in range(len(hosts)) if rank not in ranks]
    stuck = silent or [rank for rank, waits in ranks.items() if waits]
    return list(dict.fromkeys(hosts[rank] for rank in stuck)) if len(stuck) < len(hosts) else []


def lines(found: Preflight) -> list[str]:
    """Return the report, 80 columns wide."""
    shown: Sequence[HostCheck] = found.hosts
    if len(shown) > _MOST_HOSTS:
        shown = sorted(shown, key=lambda host: (host.host not in found.bad, host.between or 0.0))[:_MOST_HOSTS]
    rows = [["host", "ranks", "GPUs", "free GiB", "in host GB/s", "between GB/s", ""]]
    for host in shown:
        free = f"{host.free_bytes / 2**30:.0f}"
        speeds = [gigabytes(host.inside), gigabytes(host.between)]
        mark = "BAD" if host.host in found.bad else "ok"
        short = host.host if len(host.host) <= _LONGEST_NAME else f"{host.host[: _LONGEST_NAME - 3]}..."
        rows.append([short, f"{host.ranks}", f"{host.gpus}", free, *speeds, mark])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [[cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    text = [f"  {'  '.join(row)}".rstrip() for row in cells]
    if len(shown) < len(found.hosts):
        text.append(f"  and {len(found.hosts) - len(shown)} faster hosts")
    if found.everyone is not None:
        text += _wrapped(f"all {sum(host.ranks for host in found.hosts)} ranks: {gigabytes(found.everyone)} GB/s")
    text += _wrapped(f"bus bandwidth of allreduces over {found.by}")
    usable = [host.between for host in found.hosts if host.between and host.host not in found.bad]
    if usable:  # what carries payload, of the bandwidth that whatif asks for
        gbit = 8e-9 * min(usable) / ETHERNET
        text += _wrapped(f"predict a run with it: hvdtrain timeline whatif RUN --bandwidth_gbit {gbit:.3g}")
    for fabric in dict.fromkeys(host.fabric for host in found.hosts if host.fabric):
        users = [host.host for host in found.hosts if host.fabric == fabric]
        text += _wrapped(f"NCCL uses {fabric}: {len(users)} of {len(found.hosts)} hosts")
    for note in found.notes:
        text += _wrapped(note)
    for host in shown:
        skewed = abs(host.skew_s) > _SKEW_S
        clock = [f"its clock differs by {host.skew_s:+.1f} s from the others"] if skewed else []
        text += [line for remark in (*host.remarks, *clock) for line in _wrapped(f"{host.host}: {remark}")]
    for name, reasons in found.bad.items():
        text += _wrapped(f"bad host {name}: {'; '.join(reasons)}")
    return [*text, f"{len(found.bad)} of {len(found.hosts)} hosts are bad" if found.bad else "no bad host"]


def gigabytes(bytes_per_s: float | None) -> str:
    """Format a bandwidth in GB/s."""
    return "-" if bytes_per_s is None else f"{bytes_per_s * 1e-9:.3g}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


class Deadline:
    """Calls `on_end` in a thread `seconds` from now, unless closed in time.

    `on_end` gets the ranks that still report, and whether each waits in a measurement; on ranks other than 0, and
    before `connect`, None. Then the collectives that each rank has last reported as running.
    """

    def __init__(
        self, seconds: float, rank: int, on_end: Callable[[dict[int, bool] | None, dict[int, list[str]]], None]
    ) -> None:
        self._until_s = time.monotonic() + seconds + (_OTHERS_S if rank else 0.0)
        self._rank, self._on_end = rank, on_end
        self._link: tuple[Store, int, Mapping[str, float]] | None = None
        self._ended = threading.Event()
        self._count = 0
        threading.Thread(target=self._run, name="preflight deadline", daemon=True).start()

    def connect(self, store: Store, size: int, in_flight: Mapping[str, float]) -> None:
        """Begin to report to `store`, which works when collectives hang. `in_flight`: the names of those that run."""
        self._link = store, size, in_flight

    def close(self) -> None:
        """Cancel the deadline."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(_EVERY_S):
            if self._link is not None:
                with suppress(RuntimeError):  # a rank has ended, and the store with it
                    self._report(self._link[0], self._link[2])
            if time.monotonic() > self._until_s:
                alive: dict[int, bool] | None = None
                running: dict[int, list[str]] = {}
                if self._link is not None and self._rank == 0:
                    alive, running = self._listen(*self._link)
                if not self._ended.is_set():
                    self._on_end(alive, running)
                return

    def _report(self, store: Store, in_flight: Mapping[str, float]) -> None:
        self._count += 1
        store.set(f"preflight/{self._rank}", json.dumps([self._count, list(in_flight)]))

    def _listen(
        self, store: Store, size: int, in_flight: Mapping[str, float]
    ) -> tuple[dict[int, bool], dict[int, list[str]]]:
        from hvdtrain.comm.link_probe import MEASURED  # imports torch, which must not be loaded before the settings

        before = _reports(store, size)
        self._ended.wait(_LISTEN_S)
        self._report(store, in_flight)
        now = _reports(store, size)
        running = {rank: report[1] for rank, report in now.items()}
        alive = {
            rank: any(name.startswith(MEASURED) for name in running[rank])
            for rank, report in now.items()
            if report != before.get(rank)
        }
        return alive, running


def _reports(store: Store, size: int) -> dict[int, list[Any]]:
    keys = {rank: f"preflight/{rank}" for rank in range(size)}
    return {rank: json.loads(store.get(key)) for rank, key in keys.items() if store.check([key])}
