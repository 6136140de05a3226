"""No compression: one allreduce in place."""

from __future__ import annotations

import torch
from torch import Tensor

from hvdtrain.compression.base import Compressor, Phases


class Plain(Compressor):
    """Sums in the dtype of the gradients; bfloat16 in fp32, because Horovod cannot sum it (horovod/horovod#4047)."""

    def make_work(self) -> Tensor:
        """Return a buffer of the dtype that is summed."""
        return self.shape.zeros(dtype=torch.float32 if self.shape.dtype == torch.bfloat16 else None)

    def exchange(self, out: Tensor) -> Phases:
        """One allreduce."""
        yield self.comm.allreduce(self.work, name=self.shape.name)
        if out is not self.work:
            out.copy_(self.work)
