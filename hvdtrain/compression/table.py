"""The compressors by name, with what each one sends and costs. Needs no torch.

A compression is written ``name``, or ``name:number`` to change the default of its number.
"""

from __future__ import annotations

import importlib
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hvdtrain.compression import sizes
from hvdtrain.compression.coding_cost import UNMEASURED, CodingCost, Copies
from hvdtrain.compression.sizes import Bucket, Payload
from hvdtrain.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from hvdtrain.comm.base import Comm
    from hvdtrain.compression.base import BucketShape, Compressor
    from hvdtrain.compression.coding import Coding
    from hvdtrain.compression.outer import OuterCoding

_WORTH = 1 << 16
"""Elements of a gradient below which its bytes do not matter."""
ONE_HOST_MIB = 32
"""Bucket size on one host, where an exchange during backward takes its time from backward: the default model on 2 ranks
and 2 cores took 1.05 of a step without exchange with buckets of 8 MiB, and 1.03 with one bucket of 27 MiB."""


@dataclass(frozen=True)
class Number:
    """The number after the colon: `low` to `high`, an integer if `whole`; `keyword` of the compressor's constructor."""

    keyword: str
    default: float
    low: float
    high: float
    whole: bool = False

    def read(self, text: str) -> float | None:
        """Return the number in a text; None if it is invalid."""
        try:
            value = float(text)
        except ValueError:
            return None
        return value if self.low <= value <= self.high and (not self.whole or value == int(value)) else None


@dataclass(frozen=True)
class Kind:
    """One line of the table.

    `auto`: whether `--parallel.compression auto` considers it. The table lists compressors that lose least first.
    """

    name: str  # its name in options
    make: str  # "module:name" of the `Compressor` in this package
    payload: Callable[[Bucket, int, float], Payload]  # bytes sent, as a function of bucket, world size and number
    tolerance: float  # of the law in `base.Compressor`, relative to the sum over ranks of the largest magnitude packed
    floor: float = 0.0  # error allowed per element in addition, however small all elements are
    copies: Copies = UNMEASURED  # estimated cost of coding; the default suits any until `coding_probe` has measured it
    copies_bfloat16: Copies | None = None  # the same for bfloat16 gradients, if they are sent in another way
    number: Number | None = None  # None if it takes no number
    feedback: bool = False  # whether it uses error feedback
    auto: bool = False
    bulk: bool = False  # it sends so much that, between hosts, training must leave the exchange processor time
    between_hosts_mib: int = 8  # bucket size: small for an early start and a short end, large for few collectives
    rounds: int = 1  # collectives of each kind in one exchange, which share its payload
    without_halves: Kind | None = None  # the line to use where an allreduce of 16-bit floats is slow
    coding: str | None = None  # "module:name" of its `Coding` here, for engines that divide parameters


@dataclass(frozen=True)
class Compression:
    """A line of the table with its number."""

    kind: Kind  # the line, or its `without_halves`
    number: float = 0.0  # the value after the colon; 0 if it takes none
    halves: bool = True  # whether an allreduce of 16-bit floats is faster than one of fp32

    def __str__(self) -> str:
        return f"{self.kind.name}:{self.number:g}" if self.kind.number else self.kind.name

    def bucket_bytes(self, *, one_host: bool) -> int:
        """Return the size limit of a bucket."""
        return (ONE_HOST_MIB if one_host else self.kind.between_hosts_mib) << 20

    def where_halves_are_slow(self) -> Compression:
        """Return the variant for Gloo on CPUs, which sums fp16 slowly: 4 MiB in 54 ms, but 8 MiB of fp32 in 9 ms."""
        return replace(self, kind=self.kind.without_halves or self.kind, halves=False)

    def payload(self, bucket: Bucket, ranks: int) -> Payload:
        """Return the bytes that each rank hands to each kind of collective in one exchange."""
        return self.kind.payload(bucket, ranks, self.number)

    def collectives(self, bucket: Bucket, ranks: int) -> list[tuple[str, float]]:
        """Return kind and bytes of each collective in one exchange, in order."""
        rounds = self.kind.rounds
        return [(kind, size / rounds) for kind, size in self.payload(bucket, ranks).items() for _ in range(rounds)]

    def estimate_coding(self, bucket: Bucket, gradient_bytes: Sequence[int], ranks: int, copy_s: float) -> CodingCost:
        """Estimate the cost of coding one bucket; for the arguments see `Copies.estimate`."""
        other = self.kind.copies_bfloat16 if bucket.dtype == "bfloat16" else None
        collectives = len(self.collectives(bucket, ranks))
        return (other or self.kind.copies).estimate(gradient_bytes, collectives, ranks, copy_s)

    def most_ranks(self, shapes: Sequence[Sequence[int]], ranks: int) -> int:
        """Return the most of `ranks` on which it sends less than fp32: an allgather brings more by each rank."""
        buckets = [Bucket([shape], "float32", math.prod(shape)) for shape in shapes if math.prod(shape) >= _WORTH]

        def sends_more(size: int) -> bool:
            coded = sum(sizes.sent_bytes(self.payload(bucket, size), size) for bucket in buckets)
            return bool(buckets) and coded >= sum(sizes.sent_bytes(sizes.plain(b, size, 0), size) for b in buckets)

        return bisect_left(range(2, ranks + 1), True, key=sends_more) + 1

    @property
    def exact(self) -> bool:
        """Whether gradients are sent uncompressed."""
        return self.kind.name == "none"

    @property
    def exact_rows(self) -> bool:
        """Whether gradients that are sent as rows are sent uncompressed."""
        return self.exact or not self.halves

    def leaves_to_rows(self, bucket: Bucket, count: int, ranks: int) -> bool:
        """Whether to send the gradient of a bucket as the `count` rows that are not zero on some rank.

        Rows may be slightly larger: they need no coding of the whole gradient and lose less.
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
        """Return the function that makes the compressor of a bucket. Imports torch."""
        number = self.kind.number
        keywords = {number.keyword: int(self.number) if number.whole else self.number} if number else {}
        make = _load_name(self.kind.make)
        if not self.kind.feedback:
            return lambda shape, comm: make(shape, comm, **keywords)
        feedback = _load_name("feedback:Feedback")
        return lambda shape, comm: feedback(make(shape, comm, keep_error=True, **keywords))

    def load_coding(self, device: torch.device) -> Coding | None:
        """Return the coding for values on a device; None if it has none. Imports torch."""
        return _load_name(self.kind.coding)(device) if self.kind.coding else None


_BF16_COPIES = Copies(0.6, (0.0, 2.2), after=0.9)
_FP16_BY_OWNERS = Kind(
    "fp16", "cast:fp16_by_owners", sizes.bf16, 2e-3, floor=1e-6, copies=_BF16_COPIES, bulk=True, between_hosts_mib=2
)

TABLE = {
    kind.name: kind
    for kind in (
        Kind("none", "cast:Plain", sizes.plain, 1e-6, copies=Copies(1.0, (), after=0.0), bulk=True),
        Kind(
            "fp16",
            "cast:fp16",
            sizes.fp16,
            2e-3,
            floor=1e-6,
            copies=Copies(1.1, (), after=2.1, commit=0.1),
            copies_bfloat16=_BF16_COPIES,
            auto=True,
            bulk=True,
            between_hosts_mib=2,
            without_halves=_FP16_BY_OWNERS,
            coding="coding:Fp16Coding",
        ),
        Kind(
            "bf16",
            "cast:Bf16",
            sizes.bf16,
            1e-2,
            copies=_BF16_COPIES,
            bulk=True,
            between_hosts_mib=2,
            coding="coding:Bf16Coding",
        ),
        Kind(
            "int8",
            "int8:Int8",
            sizes.int8,
            1e-6,
            copies=Copies(1.5, (5.3, 2.0), after=1.6, commit=0.3),
            feedback=True,
            auto=True,
            bulk=True,
            coding="coding:Int8Coding",
        ),
        Kind(
            "int8-stochastic", "int8:stochastic", sizes.int8, 2e-2, copies=Copies(1.0, (5.3, 2.0), after=1.6), bulk=True
        ),
        Kind(
            "topk",
            "topk:TopK",
            sizes.topk,
            1e-6,
            copies=Copies(1.5, (6.4,), after=1.5, after_per_rank=0.05, commit=0.3),
            number=Number("share", 0.01, 1e-5, 1),
            feedback=True,
        ),
        Kind(
            "powersgd",
            "powersgd:PowerSGD",
            sizes.powersgd,
            1e-5,
            copies=Copies(1.5, (1.2, 1.2), (0.0, 0.8), after=2.0, commit=0.3),
            number=Number("rank", 4, 1, 128, True),
            feedback=True,
            auto=True,
            rounds=2,
        ),
    )
}


def choices() -> list[str]:
    """Return how each compression is written, with the range of its number."""
    return [
        f"{name} or {name}:{kind.number.default:g} ({kind.number.low:g} to {kind.number.high:g})"
        if kind.number
        else name
        for name, kind in TABLE.items()
    ]


def auto_candidates() -> list[str]:
    """Return the compressions that `--parallel.compression auto` considers, those that lose least first."""
    return [str(parse(kind.name)) for kind in TABLE.values() if kind.auto]


def parse(text: str) -> Compression:
    """Return the compression that `text` names, such as "fp16" or "topk:0.01".

    Errors: ConfigError: there is no such compression, or its number is invalid.
    """
    name, colon, written = text.partition(":")
    kind = TABLE.get(name)
    if kind is not None:
        if not colon:
            return Compression(kind, kind.number.default if kind.number else 0.0)
        if kind.number and (value := kind.number.read(written)) is not None:
            return Compression(kind, value)
    raise ConfigError(f"invalid compression {text!r}", expected=", ".join(choices()), next_step="choose one of these")


_OUTER = {"none": "", "bf16": "outer:Bf16", **dict.fromkeys(sizes.OUTER_BLOCKS, "outer:Blocks")}
_OUTER["topk"] = "outer:ChunkedTopK"
"""The coding of each value of ``--outer.compression``."""
_SHARE = Number("share", 0.03, 1 / sizes.OUTER_CHUNK, 0.5)


@dataclass(frozen=True)
class OuterKind:
    """A value of ``--outer.compression``; `number` is that after the colon."""

    name: str
    number: float = 0.0

    def payload_bytes(self, length: int) -> int:
        """Return the bytes of the encoded change of `length` values."""
        return sizes.outer_payload(self.name, self.number, length)

    def load(self) -> OuterCoding | None:
        """Return the coding; None for fp32. Imports torch."""
        return _load_name(_OUTER[self.name])(self.name, self.number) if _OUTER[self.name] else None


def parse_outer(text: str) -> OuterKind:
    """Return the coding that ``--outer.compression`` names, such as "int4" or "topk:0.03".

    Errors: ConfigError: there is no such coding, or its number is invalid.
    """
    name, colon, written = text.partition(":")
    if name in _OUTER and not colon:
        return OuterKind(name, _SHARE.default if name == "topk" else 0.0)
    if name == "topk" and (share := _SHARE.read(written)) is not None:
        return OuterKind(name, share)
    raise ConfigError(
        f"invalid --outer.compression {text!r}",
        expected=f"{', '.join(_OUTER)}, or topk:FRACTION with {_SHARE.low:.2g} to {_SHARE.high:g}",
        next_step="choose one of these",
    )


def _load_name(spec: str) -> Any:
    module, _, name = spec.partition(":")
    return getattr(importlib.import_module(f"hvdtrain.compression.{module}"), name)
