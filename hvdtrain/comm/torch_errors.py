"""Errors of torch.distributed that mean that another rank is lost."""

from __future__ import annotations

import re

import torch.distributed as dist

from hvdtrain.errors import LostRankError

_CONNECTION = re.compile(
    r"gloo/transport|[Cc]onnection (was )?(closed|reset|refused)|NCCL (error|communicator)|Broken pipe"
)


def is_lost_rank(error: BaseException) -> bool:
    """Check whether an error of torch means that another rank is lost."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and bool(_CONNECTION.search(str(error)))
    )


def lost_rank(error: BaseException, what: str) -> LostRankError:
    """Return the error to raise instead of torch's. `what`: what this rank waited for."""
    return LostRankError(
        f"another rank was lost during {what}",
        found=str(error).strip().partition("\n")[0],
        next_step="look for the first error in the output of the other ranks",
    )
