"""Numbers on their way from a device to the host, which waits only when it reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """A copy of a small tensor on the host. Work that the device gets after it does not delay it.

    `synchronized` is called when the host has waited for a device: with a timing event that has just happened there,
    and whether it happened during the wait.
    """

    def __init__(self, tensor: Tensor, synchronized: Callable[[Any, bool], None] | None = None) -> None:
        self._synchronized = synchronized
        self._host = tensor
        self._copied: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(tensor.device))

    def tolist(self) -> Any:
        """Return the numbers, nested like the tensor; wait for the copy."""
        if self._copied is not None:
            waits = not self._copied.query()  # type: ignore[no-untyped-call]
            self._copied.synchronize()
            if self._synchronized is not None:
                self._synchronized(self._copied, waits)
        return self._host.tolist()
