"""Measured links: the pairs to measure at once, the checks that find slow ones, and a table. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from hvdtrain.doctor.finding import Finding, names

_SLOW = 0.5  # a link is slow below this part of the median bandwidth
_LATE, _LATE_S = 3.0, 50e-6
"""Latency is high above this multiple of the median, and if it exceeds the median by this time."""
_SLOW_INTERFACE = 0.6  # part of the interface's speed that a single TCP stream exceeds if nothing is wrong
_MOST_HOSTS = 12  # largest number of hosts in the table. With more, the slowest links are listed

MOST_S = 20.0
"""Approximate limit for measuring all links."""
MOST_ROUNDS = 64
"""More rounds of pairs would take minutes. In larger clusters each host is measured with this many others."""


@dataclass(frozen=True)
class Direction:
    """One direction of a link between two hosts, or between two ranks of a host."""

    source: str  # a host
    target: str  # a host
    latency_s: float  # one-way time of a small message
    bytes_per_s: float  # bandwidth in this direction

    @property
    def gbit(self) -> float:
        """Bandwidth in Gbit/s."""
        return self.bytes_per_s * 8e-9

    @property
    def inside(self) -> bool:
        """Whether both ranks are on the same host."""
        return self.source == self.target

    def __str__(self) -> str:
        return self.source if self.inside else f"{self.source} to {self.target}"


@dataclass(frozen=True)
class Links:
    """All measured links."""

    hosts: Sequence[str]  # in the user's order, or in that of the ranks
    ways: Sequence[Direction]  # both of every pair of hosts, and links within hosts that have several ranks
    by: str  # protocol of the measurement

    @property
    def between(self) -> list[Direction]:
        """Links between hosts."""
        return [one for one in self.ways if not one.inside]

    @property
    def inside(self) -> list[Direction]:
        """Links within hosts."""
        return [one for one in self.ways if one.inside]


def check_links(links: Links, interface_mbit: Mapping[str, int] | None = None) -> list[Finding]:
    """Report the measured links, and each link that is much slower than the others or its interface, where known."""
    found = []
    for name, directions in (("links", links.between), ("in a host", links.inside)):
        if directions:
            found.append(Finding(name, "ok", _summary(directions), f"measured with {links.by}"))
            found += _slow(directions)
            found += _late(directions)
    return found + _slow_interfaces(links, interface_mbit or {})


def _summary(directions: Sequence[Direction]) -> str:
    speeds = sorted(one.gbit for one in directions)
    spread = f" ({gbit(speeds[0])} to {gbit(speeds[-1])})" if len(directions) > 1 else ""
    latency = microseconds(median(one.latency_s for one in directions))
    return f"{gbit(_median_gbit(directions))}{spread}, {latency} per small message"


def _median_gbit(directions: Iterable[Direction]) -> float:
    return median(one.gbit for one in directions)


def _slow(directions: Sequence[Direction]) -> list[Finding]:
    usual = _median_gbit(directions)
    why = "every allreduce is as slow as its slowest link"
    found = []
    slow_hosts = [] if directions[0].inside else _slow_hosts(directions, usual)
    for host in slow_hosts:
        mine = [one for one in directions if host in (one.source, one.target)]
        fix = f"on {host}: check ethtool IF (speed, duplex, errors), cable, port and switch; or leave the host out"
        text = f"{gbit(_median_gbit(mine))} to the other hosts; the median is {gbit(usual)}"
        found.append(Finding(f"slow {host}", "warning", text, why, fix))
    for one in directions:
        if one.gbit < _SLOW * usual and not {one.source, one.target} & set(slow_hosts):
            fix = f"on {one.source}: check ethtool IF, ip -s link, tc qdisc show, " + (
                "numactl --hardware and other programs" if one.inside else f"and the route to {one.target}"
            )
            text = f"{gbit(one.gbit)}; the median is {gbit(usual)}"
            found.append(Finding(f"slow {one}", "warning", text, why, fix))
    return found


def _slow_hosts(directions: Sequence[Direction], usual: float) -> list[str]:
    """Return the hosts with mostly slow links. With only two hosts there are none, because they share their links."""
    hosts = dict.fromkeys(name for one in directions for name in (one.source, one.target))
    return [h for h in hosts if _median_gbit(w for w in directions if h in (w.source, w.target)) < _SLOW * usual]


def _late(directions: Sequence[Direction]) -> list[Finding]:
    usual = median(one.latency_s for one in directions)
    late = [one for one in directions if one.latency_s > max(_LATE * usual, usual + _LATE_S)]
    if not late:
        return []
    text = names(f"{one}: {microseconds(one.latency_s)}" for one in late)
    why = f"the median is {microseconds(usual)}; ranks agree on every tensor with small messages before they send it"
    fix = "check that these hosts share a switch and run no other programs; check ethtool -c IF"
    return [Finding("late links", "warning", text, why, fix)]


def _slow_interfaces(links: Links, interface_mbit: Mapping[str, int]) -> list[Finding]:
    found = []
    for host, mbit in interface_mbit.items():
        best = max((one.gbit for one in links.between if host in (one.source, one.target)), default=0.0)
        if 0 < best < _SLOW_INTERFACE * mbit * 1e-3:
            text = f"{gbit(best)} at best; its interface has {gbit(mbit * 1e-3)}"
            why = "one TCP stream does not fill the link, a part of the path is slower, or other traffic uses it"
            fix = f"on {host}: check iperf3 -P 4, sysctl net.ipv4.tcp_rmem net.ipv4.tcp_wmem, and the switches"
            found.append(Finding(f"link of {host}", "warning", text, why, fix))
    return found


def link_table(links: Links) -> list[str]:
    """Return a table as plain lines, in Gbit/s and microseconds: one row per source, one column per target."""
    if len(links.hosts) > _MOST_HOSTS:
        slowest = sorted(links.between, key=lambda one: one.bytes_per_s)[:_MOST_HOSTS]
        return [f"the slowest of {len(links.between)} directions:", *(f"  {one}: {_cell(one)}" for one in slowest)]
    by_pair = {(one.source, one.target): one for one in links.ways}
    rows = [["from / to", *links.hosts]]
    rows += [[source, *(_cell(by_pair.get((source, target))) for target in links.hosts)] for source in links.hosts]
    return ["Gbit/s, and microseconds per small message:", *aligned(rows)]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return indented lines with right-aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _cell(direction: Direction | None) -> str:
    return "-" if direction is None else f"{direction.gbit:.3g} {direction.latency_s * 1e6:.3g}us"


def gbit(number: float) -> str:
    """Format a bandwidth."""
    return f"{number:.3g} Gbit/s" if number >= 0.9995 else f"{number * 1e3:.3g} Mbit/s"


def microseconds(seconds: float) -> str:
    """Format a latency."""
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Return all pairs of `count` hosts in both directions, in rounds where no host occurs twice (circle method).

    If there are more than `MOST_ROUNDS` rounds of pairs, return that many, evenly spread.
    """
    if count < 2:
        return []
    places: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    found = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        meet = zip(places[:half], reversed(places[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in meet if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    if len(found) > MOST_ROUNDS:
        found = [found[number * len(found) // MOST_ROUNDS] for number in range(MOST_ROUNDS)]
    return [way for pairs in found for way in (pairs, [(b, a) for a, b in pairs])]


def budget_s(count: int) -> float:
    """Return seconds for one direction between two of `count` hosts, so that everything takes `MOST_S` at most."""
    return min(1.0, MOST_S / (len(rounds(count)) + 1))
