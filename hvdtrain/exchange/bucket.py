"""A bucket of gradients: packed by backward's hooks, then driven from one collective to the next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from hvdtrain.comm.base import Handle
from hvdtrain.compression.base import Compressor, Phases
from hvdtrain.errors import JoinedError
from hvdtrain.exchange.buckets import Layout, as_gradient, as_real

T = TypeVar("T")


class Bucket(ABC):
    """Gradients that are exchanged together.

    Args:
        layout: of the bucket.
        factor: applied to the sum.
        as_views: whether the parameters' gradients become views of the bucket. Otherwise they stay the same tensors.

    Attributes:
        missing: indices of the gradients of this step that are not packed yet.
        eager: whether it starts as soon as it is full, because its exchange does not wait for the device.
        kept_bytes: memory of the sums that remain after the exchange, besides the parameters' gradients.
    """

    eager = True
    kept_bytes = 0

    def __init__(self, layout: Layout, factor: float, *, as_views: bool) -> None:
        self.layout = layout
        self._factor = factor
        self._as_views = as_views
        self.begin()

    def begin(self) -> None:
        """Start another step."""
        self.missing = set(range(len(self.layout.parameters)))
        self._phases: Phases | None = None
        self._handle: Handle | None = None

    def pack(self, index: int, weight: float) -> None:
        """Pack the gradient of a parameter, times `weight`; zero if it has none.

        If gradients are views, the parameter then has none until `set_gradients`, so that its memory is free.
        """
        parameter = self.layout.parameters[index]
        self._pack(index, parameter.grad, weight)
        if self._as_views:
            parameter.grad = None
        self.missing.remove(index)

    @abstractmethod
    def _pack(self, index: int, gradient: Tensor | None, weight: float) -> None: ...

    @abstractmethod
    def _exchange(self) -> Phases: ...

    @abstractmethod
    def _sums(self) -> list[Tensor]:
        """Return the sum for each parameter; views of the bucket, if it has a buffer."""

    def set_gradients(self) -> list[Tensor]:
        """Make the sums the parameters' gradients; return the tensors that clipping has to multiply."""
        sums = self._sums()
        own, received = [], []
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
                received.append(total)
        if own:
            torch._foreach_copy_(own, received)
        return [total._values() if total.is_sparse else total for total in sums]

    @property
    def exchange_bytes(self) -> int:
        """Memory of the exchange while it runs."""
        return self.layout.shape.length * self.layout.shape.dtype.itemsize

    @property
    def started(self) -> bool:
        """Whether the exchange of this step has started."""
        return self._phases is not None

    @property
    def running(self) -> bool:
        """Whether the exchange has started and not finished."""
        return self._handle is not None

    def start(self) -> None:
        """Start the exchange. Collective: yes, with the same bucket of the other ranks, in any order."""
        self._phases = phases = self._exchange()
        self._continue(lambda: next(phases))

    def advance(self) -> bool:
        """Continue if the current collective has finished; return whether it had."""
        if self._handle is None or not self._handle.done():
            return False
        self.wait()
        return True

    def wait(self) -> None:
        """Wait for the current collective, then continue."""
        assert self._handle is not None and self._phases is not None
        try:
            result = self._handle.wait()
        except JoinedError as error:
            self._continue(partial(self._phases.throw, error))  # the exchange may have a fallback
            return
        self._continue(partial(self._phases.send, result))

    def _continue(self, resume: Callable[[], Handle]) -> None:
        try:
            self._handle = resume()
        except StopIteration:
            self._handle = None


class DenseBucket(Bucket):
    """Gradients that a compressor sums.

    Attributes:
        residuals: by index, residuals that the compressor cannot take over; each is packed with its gradient.
        out: (length,) the sums, in the dtype of the gradients.
    """

    def __init__(self, layout: Layout, factor: float, compressor: Compressor, *, as_views: bool) -> None:
        super().__init__(layout, factor, as_views=as_views)
        self.compressor = compressor
        self.out = compressor.make_out()
        parts = zip(layout.shape.parts, layout.parameters, strict=True)
        self._views = [as_gradient(part.view(self.out), parameter) for part, parameter in parts]
        self.residuals: dict[int, Tensor] = {}

    def _pack(self, index: int, gradient: Tensor | None, weight: float) -> None:
        if gradient is not None:
            gradient = as_real(gradient.to_dense() if gradient.is_sparse else gradient)
        if (residual := self.residuals.get(index)) is not None:
            residual = residual.to(self.layout.shape.device) / weight
            gradient = (residual if gradient is None else residual + gradient).to(self.layout.shape.dtype)
        self.compressor.pack(index, gradient, weight)

    def _exchange(self) -> Phases:
        yield from self.compressor.exchange(self.out)
        if self._factor != 1.0:
            self.out.mul_(self._factor)

    def _sums(self) -> list[Tensor]:
        # One view per parameter: a norm over 30 MB summed in fp32 is off by 2e-4, that of the parts by 6e-6.
        return self._views


class SideStream:
    """The CUDA stream that compressors run on, so that they do not delay backward. On the CPU it does nothing.

    An exchange starts after its bucket is packed, and `join` makes the current stream wait for the exchange. The host
    waits for neither.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._packed: set[torch.cuda.Stream] = set()

    def record_packed(self) -> None:
        """Record that a gradient was packed on the current stream."""
        if self._stream is not None:
            self._packed.add(torch.cuda.current_stream(self._stream.device))

    def run(self, action: Callable[[], T]) -> T:
        """Run `action` on this stream, after the recorded packing."""
        if self._stream is None:
            return action()
        for stream in self._packed:
            self._stream.wait_stream(stream)
        self._packed.clear()
        with torch.cuda.stream(self._stream):
            return action()

    def join(self) -> None:
        """Make the current stream wait for this stream."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
