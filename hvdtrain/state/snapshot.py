"""A copy of a state in memory that is allocated once, to write a checkpoint or to roll back."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from hvdtrain.state.train_state import StateDict

_ALIGNMENT = 64

_Layout = list[tuple[str, str, torch.Size, torch.dtype]]


class Snapshot:
    """A copy of the newest captured state.

    All tensors share one buffer on the host, which is page-locked if the state is on CUDA. The buffer is allocated by
    the first `capture`, and again when tensors are added or change shape, such as optimizer state in the first step.
    Copying is as fast as copying one tensor of the same size.

    `capture` overwrites the tensors that `state` returned before. Finish reading them first.
    """

    def __init__(self) -> None:
        self.step = -1  # optimizer steps done at the capture; -1 before
        self._layout: _Layout = []
        self._pinned = False
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._views: list[Tensor] = []
        self._groups: list[str] = []
        self._values = "{}"
        self._copied: torch.cuda.Event | None = None
        self._unpin: Callable[[], object] = lambda: None

    def capture(self, state: StateDict, step: int) -> None:
        """Copy a state with tensors on any devices, of any layout.

        On CUDA this returns before the copies are done. They are on the stream of training, ahead of any change of
        the tensors, and `state` waits for them.
        """
        named = [(group, name, t.detach()) for group, tensors in state.tensors.items() for name, t in tensors.items()]
        layout = [(group, name, tensor.shape, tensor.dtype) for group, name, tensor in named]
        sources = [tensor for _, _, tensor in named]
        device = next((tensor.device for tensor in sources if tensor.is_cuda), None)
        self.step = -1  # in case the copy fails
        self._values = json.dumps(dict(state.values))  # a deep copy, as in a file
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
        """The captured state: views of the buffer, on the CPU, and a new copy of the values."""
        assert self.step >= 0, "nothing was captured"
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        tensors: dict[str, dict[str, Tensor]] = {group: {} for group in self._groups}
        for (group, name, _, _), view in zip(self._layout, self._views, strict=True):
            tensors[group][name] = view
        return StateDict(tensors, json.loads(self._values))

    def _allocate(self, layout: _Layout, pinned: bool) -> None:
        self._unpin()
        self._views, self._buffer = [], torch.empty(0, dtype=torch.uint8)  # frees the old one first
        places, end = [], 0
        for _, _, shape, dtype in layout:
            places.append(end)
            end += -(-shape.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self._buffer = torch.zeros(end, dtype=torch.uint8)  # zeros allocate the pages
        if pinned:
            self._unpin = self._pin()
        for place, (_, _, shape, dtype) in zip(places, layout, strict=True):
            part = self._buffer[place : place + shape.numel() * dtype.itemsize]
            self._views.append(part.view(dtype).reshape(shape))
        self._layout, self._pinned = layout, pinned

    def _pin(self) -> Callable[[], object]:
        """Page-lock the buffer, and return what undoes it.

        torch's allocator of page-locked memory rounds sizes up to powers of two and keeps what was freed.
        """
        runtime, address = torch.cuda.cudart(), self._buffer.data_ptr()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(runtime.cudaHostRegister(address, self._buffer.nbytes, 0))
        return weakref.finalize(self, runtime.cudaHostUnregister, address)
