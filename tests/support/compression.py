"""Buckets, gradients and one step of a compressor, as a reducer drives it; the law that it is held to."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from hvdtrain.comm.base import Comm, Handle
from hvdtrain.compression.base import BucketShape, Compressor, Part, commit_all
from hvdtrain.compression.table import Compression, Kind
from tests.support.thread_comm import on_ranks

SHAPES: Sequence[Sequence[int]] = ((7,), (), (96, 40), (0, 3), (96, 40), (1200, 1), (5, 3, 2), (96, 40), (40, 8, 3, 3))
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_ALIGNMENT = 16


class Counting:
    """A Comm that counts the bytes handed to it by kind of collective."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self.bytes: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._comm, name)
        if name not in ("allreduce", "allgather", "alltoall", "reducescatter", "broadcast"):
            return value

        def counted(tensor: Tensor, **how: Any) -> Handle:
            self.bytes[name] += tensor.nbytes
            return value(tensor, **how)  # type: ignore[no-any-return]

        return counted


def bucket(
    shapes: Sequence[Sequence[int]], dtype: torch.dtype = torch.float32, first: int = 0, *, turned: bool = False
) -> BucketShape:
    """Parts p0, p1, ... with gaps between them, on torch's default device; `turned` ones are stored column-major."""
    parts, length = [], 0
    for number, shape in enumerate(shapes, first):
        stride = torch.empty(tuple(reversed(shape)), device="meta").stride()[::-1] if turned else None
        parts.append(Part(f"p{number}", torch.Size(shape), length, stride))
        length += -(-math.prod(shape) // _ALIGNMENT) * _ALIGNMENT
    return BucketShape(f"bucket{first}", tuple(parts), length, dtype, torch.get_default_device())


def gradients(shape: BucketShape, seed: int) -> list[Tensor]:
    """Of unlike magnitudes; every other one is not contiguous where it has more than one dimension."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number, part in enumerate(shape.parts):
        made = torch.randn(part.shape[::-1], generator=generator, device="cpu").mul(10.0 ** (number % 3 - 2))
        made = made.to(shape.device, shape.dtype)
        turned = made.permute(tuple(reversed(range(made.dim()))))
        found.append(turned if number % 2 else turned.contiguous())
    return found


def exchange(compressor: Compressor, values: Sequence[Tensor | None], weight: float = 1.0) -> Tensor:
    """Pack and exchange, as a reducer drives it; a new `out`, without what lies in gaps."""
    for index, value in enumerate(values):
        compressor.pack(index, value, weight)
    return drive(compressor)


def drive(compressor: Compressor, out: Tensor | None = None) -> Tensor:
    if out is None:
        out = torch.full((compressor.shape.length,), 7.0, dtype=compressor.shape.dtype)
    phases = compressor.exchange(out)
    result: Any = None  # what starts a generator
    with suppress(StopIteration):
        while True:
            result = phases.send(result).wait()
    return out


def parts(compressor: Compressor, flat: Tensor) -> Tensor:
    """What of `flat` is no gap, in float64."""
    return torch.cat([torch.zeros(0), *(part.view(flat).double().flatten() for part in compressor.shape.parts)])


def total(comm: Comm, mine: Tensor) -> Tensor:
    """The sum over ranks in float64."""
    return comm.allreduce(mine.double().clone(), name="test/total").wait()


def step(compressor: Compressor, values: Sequence[Tensor | None], *, applied: bool = True) -> Tensor:
    out = exchange(compressor, values)
    commit_all([compressor], applied=applied)
    return out


def check_law(compressor: Compressor, kind: Kind, values: Sequence[Tensor | None], weight: float = 1.0) -> Tensor:
    """A step; see that what was given, with what was left before and less what is left now, is what came out."""
    before = residual_sum(compressor)
    out = exchange(compressor, values, weight)
    commit_all([compressor], applied=True)
    given = [
        torch.zeros(part.shape) if v is None else v for part, v in zip(compressor.shape.parts, values, strict=True)
    ]
    mine = weight * torch.cat([torch.zeros(0), *(v.double().flatten() for v in given)])
    expected = total(compressor.comm, mine) + before - residual_sum(compressor)
    most = [torch.cat([part.abs(), torch.zeros(1)]).max() for part in (mine, before)]
    largest = total(compressor.comm, most[0][None]) + most[1]
    least = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}.get(compressor.shape.dtype, 0.0)
    tolerance = max(kind.tolerance, least)
    error = (expected - parts(compressor, out)).abs()
    assert bool((error <= tolerance * largest + kind.floor).all()), f"{float(error.max())} of {float(largest)}"
    return out


def residual_sum(compressor: Compressor) -> Tensor:
    """What is still to be delivered, summed over ranks."""
    for index in range(len(compressor.shape.parts)):
        compressor.pack(index, None)
    return total(compressor.comm, parts(compressor, compressor.work))


class _Count(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return function(*args, **(kwargs or {}))


class _Uncounted:
    """A communicator, or a handle of it, whose own operations do not count."""

    def __init__(self, counted: Any) -> None:
        self._counted = counted

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._counted, name)
        if not callable(found):
            return found

        def call(*arguments: Any, **options: Any) -> Any:
            with _disable_current_modes():
                result = found(*arguments, **options)
            return _Uncounted(result) if hasattr(result, "wait") else result

        return call


def operations(compression: Compression, shape: BucketShape, size: int) -> int:
    """Return how many operations one of `size` ranks runs to pack, exchange and commit: on a GPU, kernels or more."""

    def body(comm: Any) -> int:
        compressor = compression.load()(shape, _Uncounted(comm))
        values = gradients(shape, comm.rank)
        with _Count() as count:
            for index, value in enumerate(values):
                compressor.pack(index, value, 0.5)
            drive(compressor, shape.zeros())
            commit_all([compressor], applied=True)
        return count.calls

    return on_ranks(size, body)[0]
