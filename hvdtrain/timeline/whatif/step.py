"""A step of a rank, as `replay` takes it. All times are in seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Collective:
    """One collective."""

    before_s: float  # work of the training thread to make the payload
    wire_s: float  # from its start to its end if no other collective is ahead of it
    cpu_s: float = 0.0  # processor time that it takes from computing, if both share a core; at most `wire_s`
    during_s: float = 0.0  # work of the training thread right after the start


@dataclass(frozen=True)
class Exchange:
    """The exchange of a bucket: a collective starts when the previous one has finished and its own payload is made."""

    collectives: Sequence[Collective]
    after_s: float = 0.0  # work of the training thread to decode the last result
    nbytes: float = 0.0  # memory of the exchange while it runs, for the limit of a step
    kept_bytes: float = 0.0  # memory of the sums that remain after it


@dataclass(frozen=True)
class Arrival:
    """A gradient: computing since the previous one or since backward began, and the time to pack it into its bucket.

    `needs`: how many more of the pass's gathers must be complete before this computing begins.
    """

    gap_s: float
    pack_s: float
    bucket: int
    needs: int = 0


@dataclass(frozen=True)
class Part:
    """A part of a forward pass: the gathers that it needs in addition to those of earlier parts, and its work."""

    needs: int
    work_s: float


@dataclass(frozen=True)
class Step:
    """A step of a rank, or one of its passes.

    Attributes:
        late_s: time to pack the gradients that backward skips, by bucket; those buckets start after backward.
        ahead_bytes: gathers start in advance while no more than these bytes are gathered at the same time; None if a
            gather starts only when it is needed.
        limit_bytes: of the memory of running exchanges and of the sums that remain: packing waits for older ones.
        earlier: passes before this one that exchange or gather, too. Their sums are complete before the next backward.
    """

    before_s: float  # until `forward` begins, or the last backward pass if that is empty
    arrivals: Sequence[Arrival]  # gradients in the order in which backward finishes them
    tail_s: float  # backward after the last gradient
    exchanges: Sequence[Exchange]
    late_s: Sequence[float] = ()
    after_s: float = 0.0  # from the last sum to the end of the step: clipping, optimizer, everything else
    forward: Sequence[Part] = ()  # the forward pass, where it needs gathered parameters
    gathers: Sequence[Exchange] = ()  # of the pass, in the order of their need
    ahead_bytes: float | None = None
    limit_bytes: float = math.inf
    earlier: Sequence[Step] = ()
