"""The compressors by name, each with what it sends: needs no torch.

A compression is written ``name``, or ``name:number`` where it takes a number that is not to be the default.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hvdtrain.compression import sizes
from hvdtrain.compression.sizes import Bucket, Payload
from hvdtrain.errors import ConfigError

if TYPE_CHECKING:
    from hvdtrain.comm.base import Comm
    from hvdtrain.compression.base import BucketShape, Compressor


ONE_HOST_MIB = 32
"""Where ranks fill their cores, an exchange beside backward only makes both wait: 1.05 of a step without exchange with
buckets of 8 MiB, 1.03 with one of 27 MiB (the default model, 2 ranks on 2 cores)."""


@dataclass(frozen=True)
class Number:
    """What follows the colon.

    Attributes:
        keyword: of the compressor's constructor.
        default: where none is written.
        low: the smallest.
        high: the largest.
        whole: whether it counts something.
    """

    keyword: str
    default: float
    low: float
    high: float
    whole: bool = False

    def holds(self, value: float) -> bool:
        """Whether `value` may stand there."""
        return self.low <= value <= self.high and (not self.whole or value == int(value))


@dataclass(frozen=True)
class Kind:
    """One line of the table.

    Attributes:
        name: how it is called in options.
        make: "module:name" of the `Compressor` in this package.
        payload: by bucket, ranks and number.
        tolerance: of the law in `base.Compressor`, over the sum over ranks of the largest magnitude packed.
        floor: what may be lost of an element beside that, however small all are.
        number: None where it takes none.
        feedback: whether what an exchange leaves behind is added to the next gradient.
        bulk: whether so much is left to send that between hosts computing has to make room for it.
        between_hosts_mib: gradients in a bucket there: small enough that the first is soon on its way and the last is
            short, large enough for few collectives.
        turns: collectives of a kind that follow one another in an exchange, and share out its payload.
        without_halves: what takes its place where a sum of halves is slow.
    """

    name: str
    make: str
    payload: Callable[[Bucket, int, float], Payload]
    tolerance: float
    floor: float = 0.0
    number: Number | None = None
    feedback: bool = False
    bulk: bool = False
    between_hosts_mib: int = 8
    turns: int = 1
    without_halves: Kind | None = None


@dataclass(frozen=True)
class Compression:
    """A line of the table and its number (0 where it takes none).

    Attributes:
        kind: the line, or what takes its place.
        number: what follows the colon.
        halves: whether an allreduce of halves takes less time than one of fp32.
    """

    kind: Kind
    number: float = 0.0
    halves: bool = True

    def __str__(self) -> str:
        return f"{self.kind.name}:{self.number:g}" if self.kind.number else self.kind.name

    def bucket_bytes(self, *, one_host: bool) -> int:
        """Of the largest bucket."""
        return (ONE_HOST_MIB if one_host else self.kind.between_hosts_mib) << 20

    @classmethod
    def none(cls) -> Compression:
        """Gradients as they are."""
        return cls(TABLE["none"])

    def where_halves_are_slow(self) -> Compression:
        """The same among ranks of which Gloo sums halves on CPUs: 54 ms of 4 MiB, and 9 of 8 MiB of fp32."""
        return replace(self, kind=self.kind.without_halves or self.kind, halves=False)

    def payload(self, bucket: Bucket, ranks: int) -> Payload:
        """Bytes that each rank hands to Comm in one exchange, by kind of collective."""
        return self.kind.payload(bucket, ranks, self.number)

    @property
    def exact(self) -> bool:
        """Whether gradients travel as they are."""
        return self.kind.name == "none"

    @property
    def exact_rows(self) -> bool:
        """Whether those gradients of which only rows are sent do."""
        return self.exact or not self.halves

    def leaves_to_rows(self, bucket: Bucket, count: int, ranks: int) -> bool:
        """Whether the one gradient of a bucket is better sent as those `count` of its rows that are not zero on a rank.

        A little more on the way is worth not coding all of it, and losing less.
        """
        plain, coded, sent = (
            sizes.sent_bytes(payload, ranks)
            for payload in (
                sizes.plain(bucket, ranks, 0),
                self.payload(bucket, ranks),
                sizes.rows(bucket.shapes[0], count, 4 if self.exact_rows else 2),
            )
        )
        return sent < min(plain / 2, coded + plain / 50)

    def load(self) -> Callable[[BucketShape, Comm], Compressor]:
        """What makes the compressor of a bucket; imports torch."""
        number = self.kind.number
        keywords = {number.keyword: int(self.number) if number.whole else self.number} if number else {}
        make = _named(self.kind.make)
        if not self.kind.feedback:
            return lambda shape, comm: make(shape, comm, **keywords)
        feedback = _named("feedback:Feedback")
        return lambda shape, comm: feedback(make(shape, comm, keep_error=True, **keywords))


_FP16_BY_OWNERS = Kind("fp16", "cast:fp16_by_owners", sizes.bf16, 2e-3, floor=1e-6, bulk=True, between_hosts_mib=2)

TABLE = {
    kind.name: kind
    for kind in (
        Kind("none", "none:Plain", sizes.plain, 1e-6, bulk=True),
        Kind(
            "fp16",
            "cast:fp16",
            sizes.fp16,
            2e-3,
            floor=1e-6,
            bulk=True,
            between_hosts_mib=2,
            without_halves=_FP16_BY_OWNERS,
        ),
        Kind("bf16", "cast:Bf16", sizes.bf16, 1e-2, bulk=True, between_hosts_mib=2),
        Kind("int8", "int8:Int8", sizes.int8, 1e-6, feedback=True, bulk=True),
        Kind("int8-stochastic", "int8:stochastic", sizes.int8, 2e-2, bulk=True),
        Kind("topk", "topk:TopK", sizes.topk, 1e-6, number=Number("share", 0.01, 1e-5, 1), feedback=True),
        Kind(
            "powersgd",
            "powersgd:PowerSGD",
            sizes.powersgd,
            1e-5,
            number=Number("rank", 4, 1, 128, True),
            feedback=True,
            turns=2,
        ),
    )
}


def choices() -> list[str]:
    """How each is written."""
    return [
        f"{kind.name}[:{kind.number.keyword} {kind.number.low:g} to {kind.number.high:g}]" if kind.number else kind.name
        for kind in TABLE.values()
    ]


def parse(text: str) -> Compression:
    """What `text` means: "fp16", "topk:0.01".

    Errors:
        ConfigError: there is no such compression, or its number is none that it takes.
    """
    name, colon, written = text.partition(":")
    kind = TABLE.get(name)
    if kind is not None:
        if not colon:
            return Compression(kind, kind.number.default if kind.number else 0.0)
        value = _number(written)
        if kind.number and value is not None and kind.number.holds(value):
            return Compression(kind, value)
    raise ConfigError(f"{text!r} is no compression", expected=", ".join(choices()), next_step="choose one of these")


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _named(spec: str) -> Any:
    module, _, name = spec.partition(":")
    return getattr(importlib.import_module(f"hvdtrain.compression.{module}"), name)
