"""Matrices of one shape in a bucket, as few strided views: one batched product processes each view."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hvdtrain.compression.base import Part

_ALIASED = 512
"""Elements. Rows at distances of a multiple of 2 KiB share few sets of a cache. A product that is written column by
column then runs at a third of the speed, unless it is made a few rows at a time."""
_ROWS = 16


class SameShapeMatrices:
    """Matrices of one shape (m, n), and their factors of rank r, stored as rows: P^T (r, m) and Q^T (r, n).

    With factors stored as (n, r) or (m, r), products take up to five times as long on a CPU. Only making P is faster
    that way.

    Attributes:
        parts: of the bucket.
        m: rows.
        n: columns.
    """

    def __init__(self, parts: Sequence[Part], m: int, n: int) -> None:
        self.parts, self.m, self.n = parts, m, n
        self._runs = _runs([part.start for part in parts])

    def views(self, flat: Tensor) -> list[tuple[slice, Tensor]]:
        """Return views (count, m, n) of a flat buffer of the bucket, each with the slice of matrices that it holds."""
        return [
            (slice(first, first + count), flat.as_strided((count, self.m, self.n), (stride, self.n, 1), start))
            for first, count, start, stride in self._runs
        ]

    def times_rows(self, flat: Tensor, q: Tensor, out: Tensor) -> None:
        """Compute P = M Q: rows `q` (count, r, n) to `out` (count, m, r)."""
        for which, matrices in self.views(flat):
            torch.bmm(matrices, q[which].transpose(1, 2), out=out[which])

    def times_columns(self, flat: Tensor, p: Tensor, out: Tensor) -> None:
        """Compute Q^T = P^T M: `p` (count, r, m) to `out` (count, r, n)."""
        for which, matrices in self.views(flat):
            torch.bmm(p[which], matrices, out=out[which])

    def write(self, flat: Tensor, p: Tensor, q: Tensor) -> None:
        """Write P Q^T to the matrices in `flat`."""
        for place, left, right in self._products(flat, p, q):
            torch.bmm(left, right, out=place)

    def subtract(self, flat: Tensor, p: Tensor, q: Tensor) -> None:
        """Subtract P Q^T from the matrices in `flat`."""
        for place, left, right in self._products(flat, p, q):
            place.baddbmm_(left, right, alpha=-1)

    def _products(self, flat: Tensor, p: Tensor, q: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield views of `flat` with the factors of their product: batches of matrices, or of a matrix's rows."""
        few = _ROWS if flat.device.type == "cpu" and self.n % _ALIASED == 0 and self.m % _ROWS == 0 else 0
        for which, matrices in self.views(flat):
            if not few:
                yield matrices, p[which].transpose(1, 2), q[which]
                continue
            for matrix, left, right in zip(matrices, p[which], q[which], strict=True):
                rows = left.unflatten(1, (-1, few)).permute(1, 2, 0)
                yield matrix.view(-1, few, self.n), rows, right.expand(len(rows), *right.shape)


def orthonormal(columns: Tensor) -> Tensor:
    """Return orthonormal rows (count, r, k) that span the same space as `columns` (count, k, r), matrix by matrix.

    Householder's QR in fp32 is orthogonal to rounding for ill-conditioned columns, unlike Gram-Schmidt and Cholesky's
    QR. It returns a full basis even for columns of zeros, so a matrix recovers from a gradient of zeros. It is also the
    fastest: one call.
    """
    basis: Tensor = torch.linalg.qr(columns).Q
    return basis.transpose(1, 2)  # rows in memory, as LAPACK leaves it


def first_guess(part: Part, rank: int, n: int) -> Tensor:
    """Return the initial Q^T (rank, n): it depends on the parameter's name alone, so it is equal on all ranks."""
    generator = torch.Generator().manual_seed(zlib.crc32(part.name.encode()))
    return torch.randn(rank, n, generator=generator, device="cpu")


def flat_views(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return contiguous views of `flat` one after another, and the rest of it as the last one."""
    counts = [math.prod(shape) for shape in shapes]
    pieces = torch.split(flat, [*counts, len(flat) - sum(counts)])
    return [*(piece.view(shape) for piece, shape in zip(pieces, shapes, strict=False)), pieces[-1]]


def _runs(starts: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """Return ascending `starts` as runs of equal distance: index of the first, count, its start, the distance."""
    runs: list[tuple[int, int, int, int]] = []
    for index, start in enumerate(starts):
        if runs:
            first, count, begin, stride = runs[-1]
            if count == 1 or start == begin + count * stride:
                runs[-1] = (first, count + 1, begin, start - starts[index - 1])
                continue
        runs.append((index, 1, start, 1))
    return runs
