"""The L2 norm of gradients, equal in every bit whether one rank has all of them or each rank has some."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from hvdtrain.plan.shards import chunk


def _sizes(shape: Sequence[int]) -> tuple[int, int]:
    """Return the elements of a chunk, and its rows of dimension 0; no rows if these are divided."""
    row, step = chunk(shape)
    return row * step, step if row == math.prod(shape[1:]) else 0


_sizes_of = lru_cache(maxsize=1 << 16)(_sizes)


def squared_norm(gradients: Sequence[Tensor], shapes: Sequence[Sequence[int]] | None = None) -> Tensor:
    """Return the squared L2 norm of gradients: float64, on the device of the first.

    Norms of chunks are in fp32, which is as fast as memory; their squares are added up in float64, in which sums hardly
    depend on their order. `shapes`: of the parameters, where gradients are chunks of theirs (default: whole ones).
    """
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    shapes = shapes or [gradient.shape for gradient in gradients]
    chunks = [
        part
        for gradient, shape, (elements, rows) in zip(gradients, shapes, map(_sizes_of, shapes), strict=True)
        for part in ((gradient,) if gradient.shape[:1] <= (rows,) else _chunks(gradient, shape, elements, rows))
    ]
    norms = list(torch._foreach_norm(chunks))
    if len({(each.dtype, each.device) for each in norms}) > 1:
        norms = [each.to(norms[0].device, torch.float64) for each in norms]
    return torch.stack(norms).double().square_().sum()


def squares_by_row(gradients: Iterable[Tensor | None], parameters: Iterable[Tensor]) -> Tensor:
    """Return the squared norm of each row (of dimension 0) of gradients: (rows,) of float64, 0 where there is none.

    The bits of a row depend on nothing but its elements. So does their sum in this order, on any number of ranks, if
    each rank has the rows of some parameters, and zeros for the others.
    """
    found = [
        torch.zeros(len(parameter) if parameter.dim() else 1, dtype=torch.float64, device=parameter.device)
        if gradient is None
        else _row_norms(gradient)
        for gradient, parameter in zip(gradients, parameters, strict=True)
    ]
    return torch.cat(found).square_() if found else torch.zeros(0, dtype=torch.float64)


def _chunks(gradient: Tensor, shape: Sequence[int], elements: int, rows: int) -> Sequence[Tensor]:
    if rows and gradient.dim() == len(shape):
        return torch.split(gradient, rows)
    return torch.split(gradient.reshape(-1), elements)


def norm(squared: Tensor) -> Tensor:
    """Return the norm from its square, rounded to fp32, which hides the order of the sum."""
    return squared.sqrt().float()


def _row_norms(gradient: Tensor) -> Tensor:
    rows = gradient.unsqueeze(-1).flatten(1) if gradient.dim() else gradient.reshape(1, 1)
    dtype = torch.promote_types(rows.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=dtype)
    return norms.double()
