"""Gradients as they are: one allreduce in place."""

from __future__ import annotations

import torch
from torch import Tensor

from hvdtrain.compression.base import Compressor, Phases


class Plain(Compressor):
    """Sums in the gradients' own dtype; bfloat16, which Horovod cannot sum (horovod/horovod#4047), in fp32."""

    def make_work(self) -> Tensor:
        """A buffer of the dtype that is summed."""
        return self.shape.zeros(dtype=torch.float32 if self.shape.dtype == torch.bfloat16 else None)

    def exchange(self, out: Tensor) -> Phases:
        """One allreduce."""
        yield self.comm.allreduce(self.work, name=self.shape.name)
        if out is not self.work:
            out.copy_(self.work)
        if self.keeps_error:
            self.work.zero_()
