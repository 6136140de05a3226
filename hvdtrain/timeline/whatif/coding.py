"""What packing, coding and decoding a bucket cost the training thread: measured, or a number of copies.

The table is what `hvdtrain.exchange.coding_probe` measured for the gradients of a Llama of 15 million parameters, by
one thread of a 2-core x86 machine with AVX-512, as multiples of the time that packing them takes.
Another machine, or sizes that fit in its caches, may differ by half.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.compression.sizes import Bucket
from hvdtrain.compression.table import Compression


@dataclass(frozen=True)
class Cost:
    """Seconds of the training thread for one bucket.

    Attributes:
        pack_s: of each gradient, while backward runs.
        before_s: of each collective, until it is handed over.
        during_s: of each, right after that.
        after_s: when the last one is over.
        commit_s: after the optimizer's step.
    """

    pack_s: Sequence[float]
    before_s: Sequence[float]
    during_s: Sequence[float]
    after_s: float
    commit_s: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return sum(self.pack_s) + sum(self.before_s) + sum(self.during_s) + self.after_s + self.commit_s

    def times(self, factor: float) -> Cost:
        """Another machine's."""
        return Cost(
            [factor * s for s in self.pack_s],
            [factor * s for s in self.before_s],
            [factor * s for s in self.during_s],
            factor * self.after_s,
            factor * self.commit_s,
        )


@dataclass(frozen=True)
class _Copies:
    """In times of packing as they are; by collective, and by rank where each rank's row is decoded."""

    pack: float
    before: tuple[float, ...]
    during: tuple[float, ...]
    after: float
    after_a_rank: float = 0.0
    commit: float = 0.0


_TABLE: Mapping[str, _Copies] = {
    "none": _Copies(1.0, (0.0,), (0.0,), 0.0),
    "fp16": _Copies(1.1, (0.0,), (0.0,), 2.1, commit=0.1),
    "bf16": _Copies(0.6, (0.0, 2.2), (0.0, 0.0), 0.9),
    "int8": _Copies(1.5, (5.3, 2.0), (0.0, 0.0), 1.6, commit=0.3),
    "int8-stochastic": _Copies(1.0, (5.3, 2.0), (0.0, 0.0), 1.6),
    "topk": _Copies(1.5, (6.4,), (0.0,), 1.5, after_a_rank=0.05, commit=0.3),
    "powersgd": _Copies(1.5, (1.2, 1.2), (0.0, 0.8), 2.0, commit=0.3),
}
COPY_S_PER_BYTE = 4.5e-11
"""Of a gradient that backward has just made, where nothing was measured."""
_CALL_S = 1.5e-5
"""Of starting a collective, of packing a gradient at all."""


def estimated(compression: Compression, bucket: Bucket, sizes_bytes: Sequence[int], ranks: int, copy_s: float) -> Cost:
    """The cost by the table.

    Args:
        compression: how the bucket travels.
        bucket: which.
        sizes_bytes: of its gradients.
        ranks: that exchange it.
        copy_s: to pack a byte as it is.
    """
    copies = _TABLE[compression.kind.name]
    if compression.kind.name == "fp16" and bucket.dtype == "bfloat16":
        copies = _TABLE["bf16"]
    whole_s = sum(sizes_bytes) * copy_s
    return Cost(
        [_CALL_S + copies.pack * size * copy_s for size in sizes_bytes],
        [_CALL_S + part * whole_s for part in copies.before],
        [part * whole_s for part in copies.during],
        (copies.after + copies.after_a_rank * ranks) * whole_s,
        copies.commit * whole_s,
    )


def of_probe(found: Mapping[str, object]) -> Cost:
    """The cost that `hvdtrain.exchange.coding_probe` has written of a bucket."""
    return Cost(**found)  # type: ignore[arg-type]
