"""Short texts for lists of hosts and their values. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_MOST = 6


def names(hosts: Iterable[str]) -> str:
    """Join names, shortened as in ``a, b and 3 more``."""
    found = list(hosts)
    if len(found) <= _MOST:
        return ", ".join(found)
    return f"{', '.join(found[:_MOST])} and {len(found) - _MOST} more"


def by_value(values: Mapping[str, object]) -> str:
    """Group hosts by value, most frequent first: ``2.13 on a, b; 2.12 on c``. One common value stands alone."""
    hosts: dict[str, list[str]] = {}
    for host, value in values.items():
        hosts.setdefault(str(value) or "none", []).append(host)
    if len(hosts) == 1:
        return next(iter(hosts))
    most_first = sorted(hosts.items(), key=lambda item: -len(item[1]))
    return "; ".join(f"{value} on {names(where)}" for value, where in most_first)
