"""Print links as a table: one row per source, one column per target. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.doctor.links.measured import Direction, Links

_MOST = 12
"""Largest number of hosts in the table. With more, the slowest links are listed."""


def lines(links: Links) -> list[str]:
    """Return the table as plain lines, in Gbit/s and microseconds."""
    if len(links.hosts) > _MOST:
        slowest = sorted(links.between, key=lambda one: one.bytes_per_s)[:_MOST]
        return [f"the slowest of {len(links.between)} directions:", *(f"  {one}: {_cell(one)}" for one in slowest)]
    by_pair = {(one.source, one.target): one for one in links.directions}
    rows = [["from / to", *links.hosts]]
    rows += [[source, *(_cell(by_pair.get((source, target))) for target in links.hosts)] for source in links.hosts]
    return ["Gbit/s, and microseconds per small message:", *aligned(rows)]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return indented lines with right-aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _cell(direction: Direction | None) -> str:
    return "-" if direction is None else f"{direction.gbit:.3g} {direction.latency_s * 1e6:.3g}us"
