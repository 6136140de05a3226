"""Ranks that do not run, with the memory that torch's DDP takes for compressed gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from hvdtrain.comm.imagined import ImaginedComm, UnderWay
from hvdtrain.comm.solo import Finished


class ImaginedDdp(ImaginedComm):
    """Ranks to which an uncompressed exchange sends as the hooks of `DdpSums` send.

    DDP itself does not run: its exchange is not in Python. Its buckets hold the gradients, as ours do.
    `compression` is the name of one of the engine's.
    """

    def __init__(self, size: int, compression: str) -> None:
        super().__init__(size)
        self._dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(compression)
        self._errors: dict[str, Tensor] | None = {} if compression == "powersgd" else None

    def allreduce(self, tensor: Tensor, *, name: str) -> Finished:
        """Return `tensor`."""
        done = super().allreduce(tensor, name=name)
        if not tensor.is_floating_point():
            return done
        if self._errors is None:
            return _Sent(tensor, tensor if self._dtype is None else tensor.to(self._dtype))
        return _Approximated(tensor, self._errors, name)


class _Sent(UnderWay):
    """Holds what is sent until all gradients have arrived."""

    def __init__(self, tensor: Tensor, sent: Tensor) -> None:
        super().__init__(tensor)
        self._sent = sent


class _Approximated(UnderWay):
    """Holds a copy for PowerSGD, and keeps the error. The matrices that are sent are small."""

    def __init__(self, tensor: Tensor, errors: dict[str, Tensor], name: str) -> None:
        super().__init__(tensor)
        self._tensor, self._errors, self._name = tensor, errors, name
        self._errors.setdefault(name, torch.zeros_like(tensor))
        self._copy = tensor.clone()

    def wait(self) -> Tensor:
        """Return the tensor."""
        self._errors[self._name] = self._copy - self._tensor
        return super().wait()
