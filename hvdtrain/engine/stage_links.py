"""What stages of a pipeline send to each other: tensors, and the state of random numbers."""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from hvdtrain.spans import Spans


class Link:
    """Transfers between neighbours, in one direction.

    Args:
        most: tensors under way. A rank that has sent as many sends another one when the first has arrived.
    """

    def __init__(self, group: dist.ProcessGroup, spans: Spans, most: float = 1, *, through_host: bool = False) -> None:
        self._group, self._spans, self._most, self._through_host = group, spans, most, through_host
        self._running: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, tensor: Tensor, stage: int) -> None:
        """Begin to send a tensor."""
        while self._running and (len(self._running) >= self._most or self._running[0][0].is_completed()):
            with self._spans.waiting_for(tensor):
                self._running.popleft()[0].wait()
        sent = tensor.detach().cpu() if self._through_host else tensor.detach()
        data = sent.contiguous().view(-1).view(torch.uint8)
        if (work := dist.isend(data, group=self._group, group_dst=stage)) is not None:
            self._running.append((work, data))

    def receive(self, like: Tensor, stage: int) -> Tensor:
        """Wait for a tensor with the shape and dtype of `like`."""
        device = torch.device("cpu") if self._through_host else like.device
        found = torch.empty(like.shape, dtype=like.dtype, device=device)
        with self._spans.waiting_for(like):
            dist.recv(found.view(-1).view(torch.uint8), group=self._group, group_src=stage)
        return found.to(like.device)


def random_state(device: torch.device) -> Tensor:
    """Return the state of torch's random numbers on a device, there: uint8. The host does not wait for the device."""
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return state.to(device)


def set_random_state(state: Tensor, device: torch.device) -> None:
    """Set the state of torch's random numbers on a device. The host waits for the device."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state.cpu(), device)
    else:
        torch.set_rng_state(state)
