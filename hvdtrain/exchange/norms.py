"""The L2 norm of gradients, equal in every bit whether one rank has all of them or each rank has some."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from hvdtrain.plan.shards import chunk_rows

_chunk_rows = lru_cache(maxsize=1 << 16)(chunk_rows)


def squared_norm(gradients: Sequence[Tensor], shapes: Iterable[Sequence[int]] | None = None) -> Tensor:
    """Return the squared L2 norm of gradients: float64, on the device of the first.

    Norms of chunks are in fp32, which is as fast as memory; their squares are added up in float64, in which sums hardly
    depend on their order. `shapes`: of the parameters, where gradients are chunks of theirs (default: whole ones).
    """
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    steps = map(_chunk_rows, shapes or [gradient.shape for gradient in gradients])
    chunks = [
        chunk
        for gradient, step in zip(gradients, steps, strict=True)
        for chunk in (torch.split(gradient, step) if gradient.shape[:1] > (step,) else (gradient,))
    ]
    norms = list(torch._foreach_norm(chunks))
    if len({(each.dtype, each.device) for each in norms}) > 1:
        norms = [each.to(norms[0].device, torch.float64) for each in norms]
    return torch.stack(norms).double().square_().sum()


def norm(squared: Tensor) -> Tensor:
    """Return the norm from its square, rounded to fp32, which hides the order of the sum."""
    return squared.sqrt().float()
