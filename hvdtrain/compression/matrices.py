"""The matrices of one shape in a bucket, as few strided views of it: a batched product takes each view at once."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hvdtrain.compression.base import Part

_ALIASED = 512
"""Elements: rows that are a multiple of 2 KiB apart fall into the same few sets of a cache. A product that is written
down its columns then runs at a third of the speed, unless it is made a few rows at a time."""
_ROWS = 16


class Alike:
    """Matrices of one shape, (m, n) each, and their factors of rank r, which as rows are P^T (r, m) and Q^T (r, n).

    With a factor of (n, r) or (m, r) in memory products take up to five times as long on a CPU; P alone is quicker
    made so than as rows.

    Attributes:
        parts: of the bucket.
        m: rows.
        n: columns.
    """

    def __init__(self, parts: Sequence[Part], m: int, n: int) -> None:
        self.parts, self.m, self.n = parts, m, n
        self._runs = _runs([part.start for part in parts])

    def views(self, flat: Tensor) -> list[tuple[slice, Tensor]]:
        """Of a flat buffer of the bucket: which of the matrices, and (that many, m, n)."""
        return [
            (slice(first, first + count), flat.as_strided((count, self.m, self.n), (stride, self.n, 1), start))
            for first, count, start, stride in self._runs
        ]

    def times_rows(self, flat: Tensor, q: Tensor, out: Tensor) -> None:
        """P = M Q: rows `q` (count, r, n) to `out` (count, m, r)."""
        for which, matrices in self.views(flat):
            torch.bmm(matrices, q[which].transpose(1, 2), out=out[which])

    def times_columns(self, flat: Tensor, p: Tensor, out: Tensor) -> None:
        """Q^T = P^T M: `p` (count, r, m) to `out` (count, r, n)."""
        for which, matrices in self.views(flat):
            torch.bmm(p[which], matrices, out=out[which])

    def write(self, flat: Tensor, p: Tensor, q: Tensor) -> None:
        """P Q^T to their places."""
        for place, left, right in self._products(flat, p, q):
            torch.bmm(left, right, out=place)

    def subtract(self, flat: Tensor, p: Tensor, q: Tensor) -> None:
        """P Q^T from what is in their places."""
        for place, left, right in self._products(flat, p, q):
            place.baddbmm_(left, right, alpha=-1)

    def _products(self, flat: Tensor, p: Tensor, q: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Places in `flat`, and the factors whose product belongs there: batches of a matrix each, or of a few rows."""
        few = _ROWS if flat.device.type == "cpu" and self.n % _ALIASED == 0 and self.m % _ROWS == 0 else 0
        for which, matrices in self.views(flat):
            if not few:
                yield matrices, p[which].transpose(1, 2), q[which]
                continue
            for matrix, left, right in zip(matrices, p[which], q[which], strict=True):
                rows = left.unflatten(1, (-1, few)).permute(1, 2, 0)
                yield matrix.view(-1, few, self.n), rows, right.expand(len(rows), *right.shape)


def orthonormal(columns: Tensor) -> Tensor:
    """Orthonormal rows (count, r, k) that span the same as `columns` (count, k, r); each matrix by itself.

    By Householder's QR in fp32: orthogonal to rounding however ill-conditioned they are, where Gram-Schmidt and
    Cholesky's QR lose it, and a whole basis even of columns of zeros, so that a matrix whose gradient was zero once
    comes back. It is also the fastest: one call.
    """
    basis: Tensor = torch.linalg.qr(columns).Q
    return basis.transpose(1, 2)  # rows in memory, as LAPACK leaves it


def first_guess(part: Part, rank: int, n: int) -> Tensor:
    """Q^T (rank, n) to start from: a function of the parameter's name, so equal on all ranks and in any bucket."""
    generator = torch.Generator().manual_seed(zlib.crc32(part.name.encode()))
    return torch.randn(rank, n, generator=generator, device="cpu")


def flat_views(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Contiguous views of `flat` one after another; what is left over is last, flat."""
    counts = [math.prod(shape) for shape in shapes]
    pieces = torch.split(flat, [*counts, len(flat) - sum(counts)])
    return [*(piece.view(shape) for piece, shape in zip(pieces, shapes, strict=False)), pieces[-1]]


def _runs(starts: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """Ascending `starts` as runs of equal distance: index of the first, how many, its start, the distance."""
    runs: list[tuple[int, int, int, int]] = []
    for index, start in enumerate(starts):
        if runs:
            first, count, begin, stride = runs[-1]
            if count == 1 or start == begin + count * stride:
                runs[-1] = (first, count + 1, begin, start - starts[index - 1])
                continue
        runs.append((index, 1, start, 1))
    return runs
