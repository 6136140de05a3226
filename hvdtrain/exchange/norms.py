"""The L2 norm of gradients, equal in every bit whether one rank has all of them or each rank has some."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from hvdtrain.plan.shards import chunk

_chunk = lru_cache(maxsize=1 << 16)(chunk)


def squared_norm(gradients: Sequence[Tensor], shapes: Iterable[Sequence[int]] | None = None) -> Tensor:
    """Return the squared L2 norm of gradients: float64, on the device of the first.

    Norms of chunks are in fp32, which is as fast as memory; their squares are added up in float64, in which sums hardly
    depend on their order. `shapes`: of the parameters, where gradients are chunks of theirs (default: whole ones).
    """
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    shapes = shapes or [gradient.shape for gradient in gradients]
    chunks = [part for each in zip(gradients, shapes, strict=True) for part in _chunks(*each)]
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


def _chunks(gradient: Tensor, shape: Sequence[int]) -> Sequence[Tensor]:
    """Return the chunks of a gradient, or of consecutive rows or elements of one, of a parameter's shape."""
    row, step = _chunk(tuple(shape))
    if gradient.numel() <= step * row:
        return (gradient,)
    if row < math.prod(shape[1:]) or gradient.dim() < len(shape):
        return torch.split(gradient.reshape(-1), step * row)
    return torch.split(gradient, step)


def norm(squared: Tensor) -> Tensor:
    """Return the norm from its square, rounded to fp32, which hides the order of the sum."""
    return squared.sqrt().float()


def _row_norms(gradient: Tensor) -> Tensor:
    rows = gradient.unsqueeze(-1).flatten(1) if gradient.dim() else gradient.reshape(1, 1)
    dtype = torch.promote_types(rows.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=dtype)
    return norms.double()
