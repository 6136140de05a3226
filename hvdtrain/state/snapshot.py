"""A copy of a state, in memory that is allocated once: to write a checkpoint from, and to go back to."""

from __future__ import annotations

import json

import torch
from torch import Tensor

from hvdtrain.state.train_state import StateDict

_ALIGNMENT = 64

_Layout = list[tuple[str, str, torch.Size, torch.dtype]]


class Snapshot:
    """One state, taken again and again.

    All tensors lie in one buffer on the host, page-locked where the state is on CUDA; so it costs the bytes of the
    state once. The buffer is made when the first is taken, and again when tensors come or change their shape, as the
    state of an optimizer does in the first step. On 2 cores 1 GB is taken at the speed of a copy of one tensor of 1 GB.

    Views of an earlier `state` show the newer one after `take`: who still reads them has to be done before.

    Attributes:
        step: optimizer steps done when it was taken; -1 before.
    """

    def __init__(self) -> None:
        self.step = -1
        self._layout: _Layout = []
        self._pinned = False
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._views: list[Tensor] = []
        self._groups: list[str] = []
        self._values = "{}"
        self._copied: torch.cuda.Event | None = None

    def take(self, state: StateDict, step: int) -> None:
        """Copy a state.

        On CUDA this returns before the copies are done: they stand in the stream that training uses, before whatever
        changes the tensors next, and `state` waits for them.

        Args:
            state: tensors on any devices, of any layout; plain values that JSON holds.
            step: optimizer steps done.
        """
        named = [(group, name, t.detach()) for group, tensors in state.tensors.items() for name, t in tensors.items()]
        layout = [(group, name, tensor.shape, tensor.dtype) for group, name, tensor in named]
        sources = [tensor for _, _, tensor in named]
        device = next((tensor.device for tensor in sources if tensor.is_cuda), None)
        self.step = -1  # should it fail
        self._values = json.dumps(dict(state.values))  # a copy of all that it holds, as a file would hold it
        self._groups = list(state.tensors)
        if layout != self._layout or (device is not None) != self._pinned:
            self._allocate(layout, device is not None)
        if sources:
            torch._foreach_copy_(self._views, sources, non_blocking=device is not None)
        if device is not None:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(device))
        self.step = step

    @property
    def state(self) -> StateDict:
        """What was taken: views of the buffer, on the CPU, and values of the caller's own."""
        assert self.step >= 0, "nothing was taken"
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        tensors: dict[str, dict[str, Tensor]] = {group: {} for group in self._groups}
        for (group, name, _, _), view in zip(self._layout, self._views, strict=True):
            tensors[group][name] = view
        return StateDict(tensors, json.loads(self._values))

    @property
    def size_bytes(self) -> int:
        """Of the buffer."""
        return self._buffer.numel()

    def _allocate(self, layout: _Layout, pinned: bool) -> None:
        self._views, self._buffer = [], torch.empty(0, dtype=torch.uint8)  # the old one goes before the new one comes
        places, end = [], 0
        for _, _, shape, dtype in layout:
            places.append(end)
            end += -(-shape.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self._buffer = torch.zeros(end, dtype=torch.uint8, pin_memory=pinned)  # zeros: the pages are there from now on
        for place, (_, _, shape, dtype) in zip(places, layout, strict=True):
            part = self._buffer[place : place + shape.numel() * dtype.itemsize]
            self._views.append(part.view(dtype).reshape(shape))
        self._layout, self._pinned = layout, pinned
