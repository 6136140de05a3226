"""Gradients as products of two thin factors.

Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression", 2019. For each matrix M, (m, n), and
Q, (n, r), of the previous step::

    P = sum over ranks of M orth(Q)
    P = orth(P)
    Q = sum over ranks of M^T P
    out = P Q^T;   error of a rank: M - P (its own M^T P)^T
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from hvdtrain.comm.base import Comm
from hvdtrain.compression import sizes
from hvdtrain.compression.base import BucketShape, Compressor, Part, Phases, is_finite

_ALIASED = 512
"""Elements. Rows at distances of a multiple of 2 KiB share few sets of a cache. A product that is written column by
column then runs at a third of the speed, unless it is made a few rows at a time."""
_ROWS = 16


class PowerSGD(Compressor):
    """Two allreduces: the left factors and all gradients that are not large matrices, then the right factors.

    Each rank computes ``P Q^T`` and ``orth`` from equal bits. On CPUs of one kind the results are equal too. On
    different CPUs libraries may add in another order, and parameters drift apart by rounding; the hash that is compared
    at each checkpoint detects it.

    Passes over the bucket, in bytes of fp32: 1 to pack, 1 for P, 1 for Q, 1 to write `out`, and if errors are kept 2
    (read, written) to subtract, during the allreduce of Q.

    `rank`: r. Tensors of fewer than two dimensions, and matrices with fewer than 2 r (m + n) elements, are sent
    uncompressed.
    """

    def __init__(self, shape: BucketShape, comm: Comm, *, rank: int, keep_error: bool = False) -> None:
        super().__init__(shape, comm, keep_error=keep_error)
        self._rank = rank
        by_sides: dict[tuple[int, int], list[Part]] = {}
        self._uncompressed: list[int] = []
        for index, part in enumerate(shape.parts):
            sides = sizes.matrix_sides(part.stored_shape, rank)
            if sides:
                by_sides.setdefault(sides, []).append(part)
            else:
                self._uncompressed.append(index)
        self._groups = [SameShapeMatrices(parts, *sides) for sides, parts in by_sides.items()]
        p_shapes = [(len(group.parts), group.m, rank) for group in self._groups]
        q_shapes = [(len(group.parts), rank, group.n) for group in self._groups]
        counts = [shape.parts[index].shape.numel() for index in self._uncompressed]
        self._first = self.add_buffer(sum(c * m * r for c, m, r in p_shapes) + sum(counts))
        *self._p, rest = _flat_views(self._first, p_shapes)
        self._rest = [
            view.view(shape.parts[index].shape)
            for view, index in zip(torch.split(rest, counts), self._uncompressed, strict=True)
        ]
        self._second, self._warm, self._own = (
            self.add_buffer(sum(c * r * n for c, r, n in q_shapes)) for _ in range(3)
        )
        self._q, self._warm_q, self._own_q = (
            _flat_views(flat, q_shapes)[:-1] for flat in (self._second, self._warm, self._own)
        )
        self._dense = None if shape.dtype == torch.float32 else self.add_buffer()
        self.load_state_dict({}, comm.size)

    def exchange(self, out: Tensor) -> Phases:
        """Run two allreduces."""
        if not len(self._first):
            return
        _copy(self._rest, [self.views[index] for index in self._uncompressed])
        for group, warm, p in zip(self._groups, self._warm_q, self._p, strict=True):
            group.times_rows(self.work, orthonormal(warm.transpose(1, 2)), p)
        yield self.comm.allreduce(self._first, name=f"{self.shape.name}/p")
        bases = [orthonormal(p) for p in self._p]
        if self._groups:
            for group, base, q in zip(self._groups, bases, self._q, strict=True):
                group.times_columns(self.work, base, q)
            self._own.copy_(self._second)
            handle = self.comm.allreduce(self._second, name=f"{self.shape.name}/q")
            if self.keeps_error:
                for group, base, q in zip(self._groups, bases, self._own_q, strict=True):
                    group.subtract(self.work, base, q)
            yield handle
        total = out if self._dense is None else self._dense
        for group, base, q in zip(self._groups, bases, self._q, strict=True):
            group.write(total, base, q)
        _copy([self.shape.parts[index].view(total) for index in self._uncompressed], self._rest)
        if total is not out:
            out.copy_(total)
        if self.keeps_error:
            for index in self._uncompressed:
                self.views[index].zero_()

    def figures(self) -> Tensor:
        """Return the sum of factors and uncompressed gradients, which is a tenth of the work of a check of each."""
        return (self._first.sum() + self._second.sum()).view(1)

    def commit(self, figures: Sequence[float], *, applied: bool) -> None:
        """Start the next step from this Q."""
        if applied and is_finite(figures):
            self._warm.copy_(self._second)

    def state_dict(self) -> dict[str, Tensor]:
        """Return Q^T, (rank, n), of each parameter that is sent as factors."""
        return {
            f"{part.name}/powersgd_q": q
            for group, batch in zip(self._groups, self._warm_q, strict=True)
            for part, q in zip(group.parts, batch, strict=True)
        }

    def load_state_dict(self, state: Mapping[str, Tensor], ranks: int) -> None:
        """Load these Q; one that is missing or has another rank is initialized."""
        for group, batch in zip(self._groups, self._warm_q, strict=True):
            for part, q in zip(group.parts, batch, strict=True):
                saved = state.get(f"{part.name}/powersgd_q")
                fits = saved is not None and saved.shape == q.shape
                q.copy_(saved if saved is not None and fits else _first_guess(part, self._rank, group.n))


def _copy(to: list[Tensor], source: list[Tensor]) -> None:
    if to:
        torch._foreach_copy_(to, source)


class SameShapeMatrices:
    """Matrices of one shape (m, n) in a bucket, as few strided views: one batched product processes each view.

    Their factors of rank r are stored as rows: P^T (r, m) and Q^T (r, n). With factors stored as (n, r) or (m, r),
    products take up to five times as long on a CPU. Only making P is faster that way.
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


def _first_guess(part: Part, rank: int, n: int) -> Tensor:
    """Return the initial Q^T (rank, n): it depends on the parameter's name alone, so it is equal on all ranks."""
    generator = torch.Generator().manual_seed(zlib.crc32(part.name.encode()))
    return torch.randn(rank, n, generator=generator, device="cpu")


def _flat_views(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
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
