"""One bucket of gradients under way: packed by backward's hooks, then driven through the phases of its compressor."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from torch import Tensor

from hvdtrain.comm.base import Handle
from hvdtrain.compression.base import Compressor, Phases
from hvdtrain.exchange.buckets import Layout

T = TypeVar("T")


class Bucket:
    """Gradients that are exchanged together.

    Args:
        layout: what lies where.
        compressor: how it travels.
        factor: what the sum is multiplied by.

    Attributes:
        out: (length,) the sums, of the gradients' dtype; afterwards each parameter's gradient is a view of it.
        views: the views, as `layout.parameters`.
        missing: how many gradients of this step are not packed yet.
    """

    def __init__(self, layout: Layout, compressor: Compressor, factor: float = 1.0) -> None:
        self.layout = layout
        self.compressor = compressor
        shape, work = layout.shape, compressor.work
        in_place = not compressor.keeps_error and work.dtype == shape.dtype and len(work) == shape.length
        self.out = work if in_place else shape.zeros()
        self.views = [part.view(self.out) for part in shape.parts]
        self._factor = factor
        self._packed = [False] * len(self.views)
        self.missing = len(self.views)
        self._phases: Phases | None = None
        self._handle: Handle | None = None

    def begin(self) -> None:
        """Expect the gradients of another step."""
        self._packed = [False] * len(self.views)
        self.missing = len(self.views)
        self._phases = self._handle = None

    def holds(self, index: int) -> bool:
        """Whether a gradient of this step is packed."""
        return self._packed[index]

    @property
    def begun(self) -> bool:
        """Whether any gradient of this step is packed."""
        return self.missing < len(self.views)

    def put(self, index: int, weight: float) -> None:
        """Pack the gradient of a parameter, times `weight`, zero where it has none; let the parameter's memory go.

        It has none until `give`: whoever scales or clips gradients that are on their way does not find any.
        """
        parameter = self.layout.parameters[index]
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            gradient = gradient.to_dense()
        self.compressor.pack(index, gradient, weight)
        parameter.grad = None
        self._packed[index] = True
        self.missing -= 1

    def put_rest(self, weight: float) -> None:
        """Pack what backward did not."""
        for index, packed in enumerate(self._packed):
            if not packed:
                self.put(index, weight)

    def give(self) -> None:
        """Make the sums the parameters' gradients."""
        for parameter, view in zip(self.layout.parameters, self.views, strict=True):
            parameter.grad = view

    @property
    def started(self) -> bool:
        """Whether the exchange of this step has begun."""
        return self._phases is not None

    @property
    def running(self) -> bool:
        """Whether it has begun and is not over."""
        return self._handle is not None

    def start(self) -> None:
        """Begin the exchange. Collective: yes, with the same bucket of the other ranks, in any order."""
        self._phases = self.compressor.exchange(self.out)
        self._next(None)

    def advance(self) -> bool:
        """Take the next step if what it waits for is there; whether it was."""
        if self._handle is None or not self._handle.done():
            return False
        self.wait()
        return True

    def wait(self) -> None:
        """Take the next step as soon as what it waits for is there."""
        assert self._handle is not None
        result = self._handle.wait()
        if result.is_cuda:  # it may have been made for another stream, to whose memory it goes back
            result.record_stream(torch.cuda.current_stream(result.device))
        self._next(result)

    def _next(self, result: Tensor | None) -> None:
        assert self._phases is not None
        try:
            self._handle = next(self._phases) if result is None else self._phases.send(result)
        except StopIteration:
            self._handle = None
            if self._factor != 1.0:
                self.out.mul_(self._factor)


class Side:
    """Where a device carries out what compressors ask for: beside backward, not in its way.

    On CUDA a stream of its own. An exchange begins after what has packed its bucket, and `join` makes the current
    stream wait for all of it; the host waits for neither. On the CPU, nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = _stream(device) if device.type == "cuda" else None
        self._packed: set[torch.cuda.Stream] = set()

    def packed(self) -> None:
        """Note that a gradient was packed on the current stream."""
        if self._stream is not None:
            self._packed.add(torch.cuda.current_stream(self._stream.device))

    def run(self, action: Callable[[], T]) -> T:
        """Do `action` there, after what was packed."""
        if self._stream is None:
            return action()
        for stream in self._packed:
            self._stream.wait_stream(stream)
        self._packed.clear()
        context: AbstractContextManager[None] = torch.cuda.stream(self._stream)
        with context:
            return action()

    def join(self) -> None:
        """Let what the current stream is given from now on come after what was done here."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
