"""Links as a table: a line a host it is from, a column a host it goes to. Pure."""

from __future__ import annotations

from hvdtrain.doctor.links.measured import Links, Way

_MOST = 12
"""Hosts; of more the slowest ways are listed."""


def lines(links: Links) -> list[str]:
    """The table: Gbit/s and microseconds."""
    if len(links.hosts) > _MOST:
        slowest = sorted(links.between, key=lambda way: way.bytes_per_s)[:_MOST]
        return [f"the slowest of {len(links.between)} ways:", *(f"  {way}: {_cell(way)}" for way in slowest)]
    of = {(way.source, way.target): way for way in links.ways}
    rows = [["from / to", *links.hosts]]
    rows += [[source, *(_cell(of.get((source, target))) for target in links.hosts)] for source in links.hosts]
    wide = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    told = ["Gbit/s, and microseconds of a small message:"]
    return told + ["  " + "  ".join(cell.rjust(size) for cell, size in zip(row, wide, strict=True)) for row in rows]


def _cell(way: Way | None) -> str:
    return "-" if way is None else f"{way.gbit:.3g} {way.latency_s * 1e6:.3g}us"
