"""The L2 norm of gradients, equal in every bit whether one rank has all of them or each rank has some."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from hvdtrain.plan.shards import chunk_rows


def squared_norm(gradients: Sequence[Tensor], shapes: Iterable[Sequence[int]] | None = None) -> Tensor:
    """Return the squared L2 norm of gradients: float64, on the device of the first.

    Norms of chunks are in fp32, which is as fast as memory; their squares are added up in float64, in which sums hardly
    depend on their order. `shapes`: of the parameters, where gradients are chunks of theirs (default: whole ones).
    """
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    sizes = tuple([gradient.shape for gradient in gradients])
    steps = _steps(sizes, sizes if shapes is None else tuple(shapes))
    chunks = list(gradients)
    if steps:
        pairs = zip(gradients, steps, strict=True)
        chunks = [chunk for g, step in pairs for chunk in (torch.split(g, step) if step else (g,))]
    norms = list(torch._foreach_norm(chunks))
    if len({(each.dtype, each.device) for each in norms}) > 1:
        norms = [each.to(norms[0].device, torch.float64) for each in norms]
    return torch.stack(norms).double().square_().sum()


@lru_cache(maxsize=8)
def _steps(sizes: tuple[Sequence[int], ...], shapes: tuple[Sequence[int], ...]) -> list[int]:
    """Return the rows of a chunk of each gradient, 0 for one that is not divided; nothing if none is."""
    rows = [chunk_rows(shape) for shape in shapes]
    steps = [step if size and size[0] > step else 0 for size, step in zip(sizes, rows, strict=True)]
    return steps if any(steps) else []


def norm(squared: Tensor) -> Tensor:
    """Return the norm from its square, rounded to fp32, which hides the order of the sum."""
    return squared.sqrt().float()
