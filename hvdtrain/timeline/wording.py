"""Numbers and names as a person reads them."""

from __future__ import annotations

import math

from hvdtrain.timeline.analysis.analysis import Estimate


def readable(text: str) -> str:
    """What any output takes: a question mark for what is no text, as a file's name may hold."""
    return text.encode("utf-8", "replace").decode()


def decimals(largest: float) -> int:
    """How many digits after the point suit numbers up to `largest`, so that they can be added up by eye."""
    return 0 if largest >= 10_000 else 1 if largest >= 100 else 2 if largest >= 1 else 3


def ms(value: float, places: int | None = None) -> str:
    """Milliseconds, by themselves with three figures."""
    if places is None:
        size = abs(round(value, 3))
        if size < 0.0005:
            return "0"
        places = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:,.{places}f}"


def interval(estimate: Estimate, places: int | None = None) -> str:
    """``[11.1 .. 13.4]``; nothing where there is none, as of a single step."""
    if not (math.isfinite(estimate.low) and math.isfinite(estimate.high)) or estimate.low == estimate.high:
        return ""
    if places is None:
        size = abs(estimate.value) or max(abs(estimate.low), abs(estimate.high))
        places = 0 if size >= 100 else 1 if size >= 10 else 2
    return f"[{estimate.low:,.{places}f} .. {estimate.high:,.{places}f}]"


def percent(share: float) -> str:
    """A share of 1; small ones are not told as nothing."""
    value = 100 * share
    if 0 < value < 1:
        return "< 1%" if value < 0.5 else "1%"
    return f"{value:.0f}%"


def speed(gb_per_s: float) -> str:
    """``597 MB/s``: powers of 1000, as links are measured."""
    return f"{nbytes(1e9 * gb_per_s)}/s"


def nbytes(count: float) -> str:
    """``26.2 MB``: powers of 1000, as links are measured."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{ms(count)} {unit}"
        count /= 1000
    return f"{ms(count)} TB"
