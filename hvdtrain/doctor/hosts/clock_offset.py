"""Estimate the clock offset between hosts from questions and answers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Offset:
    """By how many seconds another clock is ahead of this host's clock, and the error bound."""

    ahead_s: float
    error_s: float


def estimate_offset(samples: Sequence[tuple[int, int, int]]) -> Offset:
    """Estimate the offset from samples: time sent, time on the other clock, time received, in nanoseconds.

    The other clock was read between sending and receiving, so the fastest sample has the smallest error (Cristian,
    "Probabilistic clock synchronization", 1989).
    """
    sent, there, came = min(samples, key=lambda sample: sample[2] - sample[0])
    return Offset((there - (sent + came) / 2) * 1e-9, (came - sent) / 2e9)


def largest_offset(offsets: Mapping[str, Offset]) -> tuple[str, str, Offset]:
    """Return the hosts with the slowest and the fastest clock, and the offset between them."""
    behind = min(offsets, key=lambda host: offsets[host].ahead_s)
    ahead = max(offsets, key=lambda host: offsets[host].ahead_s)
    low, high = offsets[behind], offsets[ahead]
    return behind, ahead, Offset(high.ahead_s - low.ahead_s, high.error_s + low.error_s)
