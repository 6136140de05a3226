"""Which compression pays: a step predicted for each from what was measured without. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.compression.sizes import Bucket, sent_bytes
from hvdtrain.compression.table import Compression

WORTH = 0.95
"""A compression has to bring the step below this share of the step without: it costs accuracy and memory."""
_AS_GOOD = 1.03
"""Of those within this factor of the fastest, the first is taken: the one that loses least."""


@dataclass(frozen=True)
class Measured:
    """What a job did without compression, on its slowest rank.

    Attributes:
        step_s: of a step.
        exposed_s: of it, waiting for gradients after backward.
        latency_s: of a collective of next to nothing.
        bytes_per_s: that a rank sends in a large one.
        ranks: that exchange.
        buckets: in the order in which they are exchanged.
        cost_s: seconds of a step that a rank spends on packing, coding and decoding, by compression; "none" too.
    """

    step_s: float
    exposed_s: float
    latency_s: float
    bytes_per_s: float
    ranks: int
    buckets: Sequence[Bucket]
    cost_s: Mapping[str, float]


@dataclass(frozen=True)
class Prediction:
    """A step with one compression.

    Attributes:
        compression: as options name it.
        wire_s: of a step, on the way.
        step_s: of a step, in all.
    """

    compression: str
    wire_s: float
    step_s: float


def predict(measured: Measured, compression: Compression) -> Prediction:
    """How long a step would take.

    As much of the way is hidden behind backward as was without compression, but of the last bucket's, which is full
    when backward is over, no greater share than then. What was waited for beyond all of the way, such as for another
    rank, no compression takes away.
    """
    wire_s = [_wire_s(measured, compression, bucket) for bucket in measured.buckets]
    plain_s = [_wire_s(measured, Compression.none(), bucket) for bucket in measured.buckets]
    hidden_s = max(0.0, sum(plain_s) - measured.exposed_s)
    tail_s = wire_s[-1] * min(1.0, measured.exposed_s / plain_s[-1]) if plain_s else 0.0
    exposed_s = max(sum(wire_s) - hidden_s, tail_s) + max(0.0, measured.exposed_s - sum(plain_s))
    added_s = measured.cost_s[str(compression)] - measured.cost_s["none"]
    return Prediction(str(compression), sum(wire_s), measured.step_s - measured.exposed_s + exposed_s + added_s)


def choose(measured: Measured, candidates: Sequence[Compression]) -> tuple[str, list[Prediction]]:
    """The compression to train with, and what was predicted.

    Args:
        measured: without compression.
        candidates: those that lose least first; "none" is not among them.
    """
    plain_s = sum(_wire_s(measured, Compression.none(), bucket) for bucket in measured.buckets)
    predictions = [Prediction("none", plain_s, measured.step_s), *(predict(measured, c) for c in candidates)]
    best_s = min(p.step_s for p in predictions)
    if best_s > WORTH * measured.step_s:
        return "none", predictions
    return next(p.compression for p in predictions if p.step_s <= _AS_GOOD * best_s), predictions


def _wire_s(measured: Measured, compression: Compression, bucket: Bucket) -> float:
    payload = compression.payload(bucket, measured.ranks)
    collectives = len(payload) * compression.kind.turns
    return collectives * measured.latency_s + sent_bytes(payload, measured.ranks) / measured.bytes_per_s
