"""What travels together: packed by backward's hooks, then driven from one collective to the next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from hvdtrain.comm.base import Handle
from hvdtrain.compression.base import Phases
from hvdtrain.errors import JoinedError
from hvdtrain.exchange.buckets import Layout

T = TypeVar("T")


class Bucket(ABC):
    """Gradients that are exchanged together.

    Args:
        layout: what it holds.
        as_views: whether the parameters' gradients are views of it; they stay the tensors that they are otherwise.

    Attributes:
        layout: as given.
        missing: how many gradients of this step are not packed yet.
        eager: whether it starts as soon as it is full: its exchange does not wait for the device.
    """

    eager = True

    def __init__(self, layout: Layout, *, as_views: bool) -> None:
        self.layout = layout
        self._as_views = as_views
        self.begin()

    def begin(self) -> None:
        """Expect the gradients of another step."""
        self._packed = [False] * len(self.layout.parameters)
        self.missing = len(self._packed)
        self._phases: Phases | None = None
        self._handle: Handle | None = None

    def holds(self, index: int) -> bool:
        """Whether a gradient of this step is packed."""
        return self._packed[index]

    def put(self, index: int, weight: float) -> None:
        """Pack the gradient of a parameter, times `weight`, zero where it has none.

        Where gradients are views, the parameter has none until `give`, and its memory is free.
        """
        parameter = self.layout.parameters[index]
        self._pack(index, parameter.grad, weight)
        if self._as_views:
            parameter.grad = None
        self._packed[index] = True
        self.missing -= 1

    def put_rest(self, weight: float) -> None:
        """Pack what backward did not."""
        for index, packed in enumerate(self._packed):
            if not packed:
                self.put(index, weight)

    @abstractmethod
    def _pack(self, index: int, gradient: Tensor | None, weight: float) -> None: ...

    @abstractmethod
    def _exchange(self) -> Phases: ...

    @abstractmethod
    def _sums(self) -> list[Tensor]:
        """Of each parameter; where views are allowed, these."""

    def give(self) -> list[Tensor]:
        """Make the sums the parameters' gradients; what of them clipping has to multiply."""
        sums = self._sums()
        own, came = [], []
        for parameter, total in zip(self.layout.parameters, sums, strict=True):
            gradient = parameter.grad
            if gradient is not None and gradient.is_sparse and not total.is_sparse:
                total = total.to_sparse(gradient.sparse_dim())
            if self._as_views or gradient is None or gradient.layout != total.layout:
                parameter.grad = total if self._as_views else total.clone()
            elif total.is_sparse:
                gradient.copy_(total)
            elif gradient is not total:
                own.append(gradient)
                came.append(total)
        if own:
            torch._foreach_copy_(own, came)
        return [total._values() if total.is_sparse else total for total in sums]

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
        self._phases = phases = self._exchange()
        self._go_on(lambda: next(phases))

    def advance(self) -> bool:
        """Take the next step if what it waits for is there; whether it was."""
        if self._handle is None or not self._handle.done():
            return False
        self.wait()
        return True

    def wait(self) -> None:
        """Take the next step as soon as what it waits for is there."""
        assert self._handle is not None and self._phases is not None
        try:
            result = self._handle.wait()
        except JoinedError as error:
            self._go_on(partial(self._phases.throw, error))  # it may know another way
            return
        if result.is_cuda:  # it may have been made for another stream, to whose memory it goes back
            result.record_stream(torch.cuda.current_stream(result.device))
        self._go_on(partial(self._phases.send, result))

    def _go_on(self, take: Callable[[], Handle]) -> None:
        try:
            self._handle = take()
        except StopIteration:
            self._handle = None


class SideStream:
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
