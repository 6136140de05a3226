"""How far the clock of another host is from this one's, from questions and answers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Offset:
    """A host's clock less this one's, in seconds, and by how much that may be off."""

    ahead_s: float
    error_s: float


def offset(looks: Sequence[tuple[int, int, int]]) -> Offset:
    """Of looks: sent, by the other host's clock, and come back, in nanoseconds.

    The other clock was read somewhere between sending and coming back: the quickest look says most (Cristian,
    "Probabilistic clock synchronization", 1989).
    """
    sent, there, came = min(looks, key=lambda look: look[2] - look[0])
    return Offset((there - (sent + came) / 2) * 1e-9, (came - sent) / 2e9)


def furthest(offsets: Mapping[str, Offset]) -> tuple[str, str, Offset]:
    """The two hosts whose clocks are furthest apart: the one behind, the one ahead, and how far."""
    behind = min(offsets, key=lambda host: offsets[host].ahead_s)
    ahead = max(offsets, key=lambda host: offsets[host].ahead_s)
    low, high = offsets[behind], offsets[ahead]
    return behind, ahead, Offset(high.ahead_s - low.ahead_s, high.error_s + low.error_s)
