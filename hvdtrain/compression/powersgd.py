"""Gradients as products of two thin factors.

Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression", 2019. Of each matrix M, (m, n), with
Q, (n, r), of the last step::

    P = sum over ranks of M orth(Q)
    P = orth(P)
    Q = sum over ranks of M^T P
    out = P Q^T;   what is left behind on a rank: M - P (its own M^T P)^T
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hvdtrain.comm.base import Comm
from hvdtrain.compression import sizes
from hvdtrain.compression.base import BucketShape, Compressor, Part, Phases
from hvdtrain.compression.matrices import Alike, first_guess, flat_views, orthonormal


class PowerSGD(Compressor):
    """Two allreduces: the left factors with all that is no large matrix, then the right ones.

    Each rank computes ``P Q^T`` and ``orth`` from equal bits. On CPUs of one kind so is the result; on unlike ones
    libraries may add in another order, and parameters drift apart by rounding: the hash of them that is compared at
    each checkpoint shows it.

    Passes over the bucket, in bytes of fp32: 1 to pack, 1 for P, 1 for Q, 1 to write `out`, and where errors are kept 2
    (read, written) to subtract, done while Q is on its way.

    Args:
        rank: r. Tensors of fewer than two dimensions, and those that 2 r (m + n) elements are no saving for, are sent
            as they are.
    """

    def __init__(self, shape: BucketShape, comm: Comm, *, rank: int, keep_error: bool = False) -> None:
        super().__init__(shape, comm, keep_error=keep_error)
        self._rank = rank
        by_sides: dict[tuple[int, int], list[Part]] = {}
        self._plain: list[int] = []
        for index, part in enumerate(shape.parts):
            sides = sizes.matrix(part.stored_shape, rank)
            if sides:
                by_sides.setdefault(sides, []).append(part)
            else:
                self._plain.append(index)
        self._groups = [Alike(parts, *sides) for sides, parts in by_sides.items()]
        p_shapes = [(len(group.parts), group.m, rank) for group in self._groups]
        q_shapes = [(len(group.parts), rank, group.n) for group in self._groups]
        plain = [shape.parts[index].shape.numel() for index in self._plain]
        self._first = shape.zeros(sum(c * m * r for c, m, r in p_shapes) + sum(plain), torch.float32)
        *self._p, rest = flat_views(self._first, p_shapes)
        self._rest = [
            view.view(shape.parts[index].shape)
            for view, index in zip(torch.split(rest, plain), self._plain, strict=True)
        ]
        self._second = shape.zeros(sum(c * r * n for c, r, n in q_shapes), torch.float32)
        self._warm, self._own = torch.zeros_like(self._second), torch.zeros_like(self._second)
        self._q, self._warm_q, self._own_q = (
            flat_views(flat, q_shapes)[:-1] for flat in (self._second, self._warm, self._own)
        )
        self._dense = None if shape.dtype == torch.float32 else shape.zeros(dtype=torch.float32)
        self.load_state_dict({}, comm.size)

    def make_work(self) -> Tensor:
        """In fp32."""
        return self.shape.zeros(dtype=torch.float32)

    def exchange(self, out: Tensor) -> Phases:
        """Two allreduces."""
        if not len(self._first):
            return
        _copy(self._rest, [self.places[index] for index in self._plain])
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
        _copy([self.shape.parts[index].view(total) for index in self._plain], self._rest)
        if total is not out:
            out.copy_(total)
        if self.keeps_error:
            for index in self._plain:
                self.places[index].zero_()

    def finite(self) -> bool:
        """Whether the factors and the rest are: their sum is looked at, a tenth of the time of looking at each."""
        return bool(torch.isfinite(self._first.sum() + self._second.sum()))

    def commit(self, *, applied: bool) -> None:
        """Start from this Q the next time."""
        if applied and self.finite():
            self._warm.copy_(self._second)

    def state_dict(self) -> dict[str, Tensor]:
        """Q^T, (rank, n), of each parameter that is sent as factors."""
        return {
            f"{part.name}/powersgd_q": q
            for group, batch in zip(self._groups, self._warm_q, strict=True)
            for part, q in zip(group.parts, batch, strict=True)
        }

    def load_state_dict(self, state: Mapping[str, Tensor], ranks: int) -> None:
        """Start from these; one of another rank, or that is missing, starts anew."""
        for group, batch in zip(self._groups, self._warm_q, strict=True):
            for part, q in zip(group.parts, batch, strict=True):
                saved = state.get(f"{part.name}/powersgd_q")
                fits = saved is not None and saved.shape == q.shape
                q.copy_(saved if saved is not None and fits else first_guess(part, self._rank, group.n))

    def buffers(self) -> list[Tensor]:
        """The memory it takes."""
        dense = [] if self._dense is None else [self._dense]
        return [self.work, self._first, self._second, self._warm, self._own, *dense]

    def _keep_error(self, bases: list[Tensor]) -> None:
        if self.keeps_error:
            for group, base, q in zip(self._groups, bases, self._own_q, strict=True):
                group.subtract(self.work, base, q)


def _copy(to: list[Tensor], what: list[Tensor]) -> None:
    if to:
        torch._foreach_copy_(to, what)
