"""Shares of the global batch by the measured speed of ranks (``--parallel.balance speed``)."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from hvdtrain.errors import ETC, ConfigError, listed
from hvdtrain.training.loop.feed import Feed
from hvdtrain.training.round import Round

EVERY = 8
"""Steps between two agreements; a rank's speed is the median of these, or of the half of them after a change."""
_WORTH = 0.95
"""The slowest rank must take at most this share of its time, or the shares stay as they are."""
_WORK = ("data", "copy", "forward", "backward")
"""Parts of a step that are a rank's own work. A GPU computes while the host reads data: there it does not count."""
_LEAST = 2
"""Micro-batches for each rank: with fewer, there is little to divide."""


def speed_shares(pass_s: Sequence[float], count: int) -> list[int]:
    """Return the micro-batches of each rank with which the slowest rank is done first, 1 or more each. Pure.

    Args:
        pass_s: seconds that a rank takes for a micro-batch.
        count: of all micro-batches; as many as ranks, or more.
    """
    shares = [1] * len(pass_s)
    ends = [(2 * seconds, rank) for rank, seconds in enumerate(pass_s)]  # if it gets one more
    heapq.heapify(ends)
    for _ in range(count - len(shares)):
        _, rank = ends[0]
        shares[rank] += 1
        heapq.heapreplace(ends, ((shares[rank] + 1) * pass_s[rank], rank))
    return shares


@dataclass
class Balance:
    """Measures how long this rank takes for a micro-batch, and changes the shares where all ranks gain.

    A part of the sums of each step. The shares are a function of the sums, so they are equal on all ranks. Boundaries
    of micro-batches do not change, so neither does the loss curve.
    """

    current: Round
    feed: Feed
    say: Callable[[str], None]
    _pass_s: deque[float] = field(default_factory=lambda: deque(maxlen=EVERY), init=False)

    def add_step(self, seconds: Mapping[str, float], passes: int) -> None:
        """Note the seconds of this rank's parts of a step. `passes`: its forward passes."""
        parts = _WORK[1:] if self.current.worker.device.type == "cuda" else _WORK
        if passes:
            self._pass_s.append(sum(seconds.get(part, 0.0) for part in parts) / passes)

    def values(self) -> list[int]:
        """Return this rank's microseconds for a micro-batch at its place, if the step ends with an agreement."""
        comm, step = self.current.comm, self.current.worker.state.progress.step
        found = [0] * comm.size
        if (step + 1) % EVERY == 0 and 2 * len(self._pass_s) >= EVERY:
            found[comm.rank] = max(1, round(1e6 * median(self._pass_s)))
        return found

    def on_sums(self, step: int, sums: Sequence[int]) -> None:
        """Change the shares if the slowest rank would be done clearly sooner. Collective: yes."""
        stream, progress = self.feed.stream, self.current.worker.state.progress
        if not all(sums) or progress.skipped_in_row:  # ranks may repeat their passes of a skipped step
            return
        before = stream.shares or stream.equal_shares()
        after = speed_shares(sums, sum(before))
        slowest, then = (max(s * n for s, n in zip(sums, shares, strict=True)) for shares in (before, after))
        if then > _WORTH * slowest or progress.step >= self.current.stop:
            return
        self._pass_s.clear()
        self.feed.stream = replace(stream, shares=tuple(after))
        self.feed.begin(progress, self.current.stop, "balanced")
        facts: dict[str, Any] = {"shares": after, "pass_s": [each * 1e-6 for each in sums]}
        self.current.recorder.event({"event": "shares", "at_step": step, **facts})
        self.say(
            f"micro-batches by speed from step {step + 1} on: {listed(after, 8, ETC)} on ranks 0, 1, ... (before"
            f" {listed(before, 8, ETC)}); the slowest rank computes {then / slowest:.2f} of the time"
        )


def make_balance(current: Round, feed: Feed) -> Balance | None:
    """Make it if the options ask for it, and there is another rank.

    Errors: ConfigError: there are too few micro-batches. In an elastic job, with other ranks later, that is a warning.
    """
    stream, size = feed.stream, current.comm.size
    if current.worker.plan.balance != "speed" or size == 1:
        return None
    count, smaller = sum(stream.equal_shares()), stream.global_batch // (_LEAST * size)
    if count < _LEAST * size:
        what = f"--parallel.balance speed has little to divide: {count} micro-batches a step on {size} ranks"
        change = f"--train.micro_batch {smaller}, or smaller" if smaller else "a larger --train.global_batch"
        if not current.rounds.elastic:
            raise ConfigError(what, expected=f"{_LEAST} or more for each rank", next_step=change)
        current.recorder.warn(f"{what}; use {change}")
    return Balance(current, feed, current.recorder.say)
