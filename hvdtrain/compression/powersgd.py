"""Gradients as products of two thin factors.

Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression", 2019. For each matrix M, (m, n), and
Q, (n, r), of the previous step::

    P = sum over ranks of M orth(Q)
    P = orth(P)
    Q = sum over ranks of M^T P
    out = P Q^T;   error of a rank: M - P (its own M^T P)^T
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hvdtrain.comm.base import Comm
from hvdtrain.compression import sizes
from hvdtrain.compression.base import BucketShape, Compressor, Part, Phases
from hvdtrain.compression.matrices import SameShapeMatrices, first_guess, flat_views, orthonormal


class PowerSGD(Compressor):
    """Two allreduces: the left factors and all gradients that are not large matrices, then the right factors.

    Each rank computes ``P Q^T`` and ``orth`` from equal bits. On CPUs of one kind the results are equal too. On
    different CPUs libraries may add in another order, and parameters drift apart by rounding; the hash that is compared
    at each checkpoint detects it.

    Passes over the bucket, in bytes of fp32: 1 to pack, 1 for P, 1 for Q, 1 to write `out`, and if errors are kept 2
    (read, written) to subtract, during the allreduce of Q.

    Args:
        rank: r. Tensors of fewer than two dimensions, and matrices with fewer than 2 r (m + n) elements, are sent
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
        self._first = shape.zeros(sum(c * m * r for c, m, r in p_shapes) + sum(counts), torch.float32)
        *self._p, rest = flat_views(self._first, p_shapes)
        self._rest = [
            view.view(shape.parts[index].shape)
            for view, index in zip(torch.split(rest, counts), self._uncompressed, strict=True)
        ]
        self._second = shape.zeros(sum(c * r * n for c, r, n in q_shapes), torch.float32)
        self._warm, self._own = torch.zeros_like(self._second), torch.zeros_like(self._second)
        self._q, self._warm_q, self._own_q = (
            flat_views(flat, q_shapes)[:-1] for flat in (self._second, self._warm, self._own)
        )
        self._dense = None if shape.dtype == torch.float32 else shape.zeros(dtype=torch.float32)
        self.load_state_dict({}, comm.size)

    def make_work(self) -> Tensor:
        """Return a buffer of fp32."""
        return self.shape.zeros(dtype=torch.float32)

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
            self._keep_error(bases)
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

    def finite(self) -> bool:
        """Whether factors and uncompressed gradients are finite; their sum is a tenth of the work of each element."""
        return bool(torch.isfinite(self._first.sum() + self._second.sum()))

    def commit(self, *, applied: bool) -> None:
        """Start the next step from this Q."""
        if applied and self.finite():
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
                q.copy_(saved if saved is not None and fits else first_guess(part, self._rank, group.n))

    def buffers(self) -> list[Tensor]:
        """Return the buffers."""
        dense = [] if self._dense is None else [self._dense]
        return [self.work, self._first, self._second, self._warm, self._own, *dense]

    def _keep_error(self, bases: list[Tensor]) -> None:
        if self.keeps_error:
            for group, base, q in zip(self._groups, bases, self._own_q, strict=True):
                group.subtract(self.work, base, q)


def _copy(to: list[Tensor], source: list[Tensor]) -> None:
    if to:
        torch._foreach_copy_(to, source)
