"""What was measured between hosts, and what stands out of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from hvdtrain.doctor.finding import Finding
from hvdtrain.doctor.hosts.host_text import names

_SLOW = 0.5
"""Of the median: what is below stands out."""
_LATE, _LATE_S = 3.0, 50e-6
"""Times the median, and at least so much more."""
_SLOW_PLUG = 0.6
"""Of what the interface has agreed on with its switch: one stream of TCP gets more where nothing is wrong."""


@dataclass(frozen=True)
class Way:
    """From one host to another, or between two ranks of one.

    Attributes:
        source, target: hosts.
        latency_s: of a few bytes, one way.
        bytes_per_s: of many, in this direction.
    """

    source: str
    target: str
    latency_s: float
    bytes_per_s: float

    @property
    def gbit(self) -> float:
        """Bits a second, in 10^9."""
        return self.bytes_per_s * 8e-9

    @property
    def inside(self) -> bool:
        """Whether it is within a host."""
        return self.source == self.target

    def __str__(self) -> str:
        return self.source if self.inside else f"{self.source} to {self.target}"


@dataclass(frozen=True)
class Links:
    """All that was measured.

    Attributes:
        hosts: in the user's order, or that of the ranks.
        ways: of every pair in both directions, and within hosts where ranks share one.
        by: what carried it.
    """

    hosts: Sequence[str]
    ways: Sequence[Way]
    by: str

    @property
    def between(self) -> list[Way]:
        """Ways from a host to another."""
        return [way for way in self.ways if not way.inside]

    @property
    def inside(self) -> list[Way]:
        """Ways within hosts."""
        return [way for way in self.ways if way.inside]

    def as_data(self) -> dict[str, Any]:
        """The same for programs; seconds and bytes."""
        return {"hosts": list(self.hosts), "by": self.by, "ways": [asdict(way) for way in self.ways]}

    @classmethod
    def of_data(cls, data: Mapping[str, Any]) -> Links:
        """What `as_data` gave."""
        return cls(data["hosts"], [Way(**way) for way in data["ways"]], data["by"])


def middle_gbit(ways: Iterable[Way]) -> float:
    """The median bandwidth."""
    return median(way.gbit for way in ways)


def middle_s(ways: Iterable[Way]) -> float:
    """The median latency."""
    return median(way.latency_s for way in ways)


def judge(links: Links, plugs_mbit: Mapping[str, int] | None = None) -> list[Finding]:
    """Name what was measured, and each link that is much worse than the others.

    Args:
        links: what was measured.
        plugs_mbit: bits a second that a host's interface has agreed on, where known.
    """
    found = []
    for name, ways in (("links", links.between), ("in a host", links.inside)):
        if ways:
            found.append(Finding(name, "ok", _summary(ways), f"by {links.by}"))
            found += _slow(ways)
            found += _late(ways)
    return found + _slow_plugs(links, plugs_mbit or {})


def _summary(ways: Sequence[Way]) -> str:
    speeds = sorted(way.gbit for way in ways)
    spread = f" ({gbit(speeds[0])} to {gbit(speeds[-1])})" if len(ways) > 1 else ""
    return f"{gbit(middle_gbit(ways))}{spread}, {microseconds(middle_s(ways))} a small message"


def _slow(ways: Sequence[Way]) -> list[Finding]:
    usual = middle_gbit(ways)
    why = "every allreduce goes at the speed of its slowest link"
    found = []
    slow_hosts = [] if ways[0].inside else _slow_hosts(ways, usual)
    for host in slow_hosts:
        mine = [way for way in ways if host in (way.source, way.target)]
        mend = f"on {host}: ethtool IF (speed, duplex, errors); its cable, port and switch; or leave it out"
        told = f"{gbit(middle_gbit(mine))} to all others, where the median is {gbit(usual)}"
        found.append(Finding(f"slow {host}", "warning", told, why, mend))
    for way in ways:
        if way.gbit < _SLOW * usual and not {way.source, way.target} & set(slow_hosts):
            mend = f"on {way.source}: ethtool IF, ip -s link, tc qdisc show; " + (
                "numactl --hardware and what else runs there" if way.inside else f"the route to {way.target}"
            )
            told = f"{gbit(way.gbit)}, where the median is {gbit(usual)}"
            found.append(Finding(f"slow {way}", "warning", told, why, mend))
    return found


def _slow_hosts(ways: Sequence[Way], usual: float) -> list[str]:
    """Hosts of which most links are slow; none of two, which share theirs."""
    hosts = dict.fromkeys(name for way in ways for name in (way.source, way.target))
    return [h for h in hosts if middle_gbit(w for w in ways if h in (w.source, w.target)) < _SLOW * usual]


def _late(ways: Sequence[Way]) -> list[Finding]:
    usual = middle_s(ways)
    late = [way for way in ways if way.latency_s > max(_LATE * usual, usual + _LATE_S)]
    if not late:
        return []
    told = names(f"{way}: {microseconds(way.latency_s)}" for way in late)
    why = f"the median is {microseconds(usual)}; small messages agree on every tensor before it is sent"
    mend = "see that these hosts are on one switch, that nothing else runs there, and ethtool -c IF"
    return [Finding("late links", "warning", told, why, mend)]


def _slow_plugs(links: Links, plugs_mbit: Mapping[str, int]) -> list[Finding]:
    found = []
    for host, mbit in plugs_mbit.items():
        mine = [way for way in links.between if host in (way.source, way.target)]
        if mine and mbit and max(way.gbit for way in mine) < _SLOW_PLUG * mbit * 1e-3:
            told = f"{gbit(max(way.gbit for way in mine))} at best, of {gbit(mbit * 1e-3)} that its interface has"
            why = "one stream does not fill the link, something on the way is slower, or others use it too"
            mend = f"on {host}: iperf3 -P 4; sysctl net.ipv4.tcp_rmem net.ipv4.tcp_wmem; the switches between"
            found.append(Finding(f"link of {host}", "warning", told, why, mend))
    return found


def gbit(number: float) -> str:
    """A bandwidth in words."""
    return f"{number:.3g} Gbit/s" if number >= 0.9995 else f"{number * 1e3:.3g} Mbit/s"


def microseconds(seconds: float) -> str:
    """A latency in words."""
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"
