"""What packing, encoding and decoding a bucket cost the training thread: measured, or estimated in copies. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

COPY_S_PER_BYTE = 4.5e-11
"""Seconds to copy a byte of a gradient that backward has just written, where nothing was measured."""
_CALL_S = 1.5e-5  # seconds to start a collective, or to pack a gradient of any size


@dataclass(frozen=True)
class CodingCost:
    """Seconds of the training thread for one bucket."""

    pack_s: Sequence[float]  # to pack each gradient, while backward runs
    before_s: Sequence[float]  # before each collective starts
    during_s: Sequence[float]  # right after each collective has started
    after_s: float  # after the last collective has finished
    commit_s: float  # after the optimizer's step

    @property
    def total_s(self) -> float:
        """The sum of all parts."""
        return sum(self.pack_s) + sum(self.before_s) + sum(self.during_s) + self.after_s + self.commit_s

    @classmethod
    def combine(cls, costs: Sequence[CodingCost], reduce: Callable[[Sequence[float]], float]) -> CodingCost:
        """Reduce several measurements of one bucket to one, number by number."""

        def columns(rows: Sequence[Sequence[float]]) -> list[float]:
            return [reduce(column) for column in zip(*rows, strict=True)]

        return cls(
            columns([cost.pack_s for cost in costs]),
            columns([cost.before_s for cost in costs]),
            columns([cost.during_s for cost in costs]),
            reduce([cost.after_s for cost in costs]),
            reduce([cost.commit_s for cost in costs]),
        )

    def scaled(self, factor: float) -> CodingCost:
        """Return the cost on a machine that takes `factor` times as long."""
        return CodingCost.combine([self], lambda column: factor * column[0])


@dataclass(frozen=True)
class Copies:
    """The cost of a compressor in copies: multiples of the time that packing the bucket uncompressed takes.

    `hvdtrain.compression.coding_probe` measured the table's values on the gradients of a Llama of 15 million parameters
    with one thread of a 2-core x86 machine with AVX-512. Another machine, or a bucket that fits in its caches, may
    differ by half. The defaults suit a compressor that nobody has measured.
    """

    pack: float = 1.5  # to pack all gradients
    before: Sequence[float] = (5.0, 2.0)  # before each collective; 0 for collectives beyond those listed
    during: Sequence[float] = ()  # right after each collective has started; 0 for collectives beyond those listed
    after: float = 2.0  # after the last collective
    after_per_rank: float = 0.0  # added to `after` for each rank, where the row of each rank is decoded
    commit: float = 0.0  # after the optimizer's step

    def estimate(self, gradient_bytes: Sequence[int], collectives: int, ranks: int, copy_s: float) -> CodingCost:
        """Estimate the cost of one bucket; `copy_s` is the seconds to pack a byte uncompressed."""
        whole_s = sum(gradient_bytes) * copy_s
        padding = [0.0] * collectives
        return CodingCost(
            [_CALL_S + self.pack * size * copy_s for size in gradient_bytes],
            [_CALL_S + part * whole_s for part in [*self.before, *padding][:collectives]],
            [part * whole_s for part in [*self.during, *padding][:collectives]],
            (self.after + self.after_per_rank * ranks) * whole_s,
            self.commit * whole_s,
        )


UNMEASURED = Copies()
