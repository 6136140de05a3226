"""The contract of a compressor: it sums one bucket of gradients over ranks, and keeps what its encoding loses."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

import torch
from torch import Tensor

from hvdtrain.comm.base import Comm, Handle
from hvdtrain.compression import sizes
from hvdtrain.host_copy import HostCopy

Phases: TypeAlias = Generator[Handle, Tensor, None]
"""A generator that yields each collective it has started, and is resumed with its result."""


def processes_at_once(device: torch.device) -> bool:
    """Return whether to process the shards of all ranks at once, which takes fewer kernels on a GPU.

    A CPU is faster with pieces that stay in its cache.
    """
    return device.type != "cpu"


@dataclass(frozen=True)
class Part:
    """The position of one parameter's gradient in a bucket."""

    name: str  # of the parameter
    shape: torch.Size  # of the gradient
    start: int  # first element in the bucket
    stride: tuple[int, ...] | None = None  # in elements for each dimension; None for row-major

    def view(self, flat: Tensor) -> Tensor:
        """Return the view of the part in `flat`, in the parameter's shape."""
        place = flat[self.start : self.start + self.shape.numel()]
        return place.view(self.shape) if self.stride is None else place.as_strided(self.shape, self.stride)

    @property
    def stored_shape(self) -> torch.Size:
        """The sizes of the dimensions in storage order, outermost first."""
        if self.stride is None:
            return self.shape
        return torch.Size([size for _, size in sorted(zip(self.stride, self.shape, strict=True), key=lambda d: -d[0])])


@dataclass(frozen=True)
class BucketShape:
    """The shape of a bucket: gradients of one dtype and device in one flat buffer."""

    name: str  # prefix of its collectives' names, unique to this bucket
    parts: tuple[Part, ...]  # ascending by position. Elements between them are gaps, which hold zero.
    length: int  # elements, including gaps
    dtype: torch.dtype  # of the gradients
    device: torch.device  # of the gradients

    @property
    def sizes(self) -> sizes.Bucket:
        """The facts that the sizes of its payloads depend on."""
        dtype = str(self.dtype).removeprefix("torch.")
        return sizes.Bucket([tuple(part.stored_shape) for part in self.parts], dtype, self.length)

    def zeros(self, length: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return a flat buffer on the bucket's device, by default of the bucket's length and dtype."""
        return torch.zeros(self.length if length is None else length, dtype=dtype or self.dtype, device=self.device)


class Figures:
    """The figures of several compressors after an exchange. The host waits for the device once, when it reads them."""

    def __init__(self, compressors: Sequence[Compressor]) -> None:
        found = [compressor.figures() for compressor in compressors]
        present = [tensor for tensor in found if tensor is not None]
        self._counts = [0 if tensor is None else len(tensor) for tensor in found]
        self._copy = HostCopy(torch.cat(present)) if present else None

    def read(self) -> list[list[float]]:
        """Return those of each compressor; none for one without figures."""
        values = iter(self._copy.tolist() if self._copy is not None else [])
        return [list(islice(values, count)) for count in self._counts]


def is_finite(figures: Sequence[float]) -> bool:
    """Return whether a result is finite, by the figures of its exchange."""
    return not figures or math.isfinite(figures[0])


def commit_all(compressors: Sequence[Compressor], *, applied: bool, figures: Figures | None = None) -> None:
    """Keep the changes of the last exchange to the state of each compressor; drop them if the step was not applied."""
    for compressor, values in zip(compressors, (figures or Figures(compressors)).read(), strict=True):
        compressor.commit(values, applied=applied)


class Compressor(ABC):
    """Sums one bucket over ranks. It is made once per bucket, with its buffers.

    Law if it keeps errors, over all ranks and to rounding: ``sum(work before) - sum(work after) == out``. The error of
    a second encoding stays with the rank that owns that shard of the sum. Law if it does not keep errors:
    ``sum(work before) == out`` to the tolerance of its line in `table`.

    Attributes:
        shape: of the bucket.
        comm: the ranks.
        keeps_error: whether `exchange` leaves in `work` the part of it that was not delivered.
        work: buffer into which gradients are packed: at least ``shape.length`` elements, of a dtype that the compressor
            chooses.
        views: of `work`, one for each part.
    """

    work: Tensor
    views: list[Tensor]

    def __init__(self, shape: BucketShape, comm: Comm, *, keep_error: bool = False) -> None:
        self.shape = shape
        self.comm = comm
        self.keeps_error = keep_error
        self._buffers: list[Tensor] = []
        self.use_work(self.make_work())

    def make_work(self) -> Tensor:
        """Return a buffer of zeros for `work`; fp32 unless a compressor chooses another dtype."""
        return self.shape.zeros(dtype=torch.float32)

    def use_work(self, work: Tensor) -> None:
        """Pack into a buffer that `make_work` has returned."""
        self.work = work
        self.views = [part.view(work) for part in self.shape.parts]

    def make_out(self) -> Tensor:
        """Return a buffer for the sums: `work` itself where `exchange` may overwrite it, to save memory."""
        in_place = not self.keeps_error and self.work.dtype == self.shape.dtype and len(self.work) == self.shape.length
        return self.work if in_place else self.shape.zeros()

    def pack(self, index: int, gradient: Tensor | None, weight: float = 1.0) -> None:
        """Pack the gradient of part `index` times `weight`; zero if there is none."""
        view = self.views[index]
        if gradient is None:
            view.zero_()
        elif weight != 1.0:
            torch.mul(gradient, weight, out=view)
        elif gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient)

    @abstractmethod
    def exchange(self, out: Tensor) -> Phases:
        """Write the sum over ranks of `work` to `out`: (length,) of the bucket's dtype. Collective: yes.

        `out` may be `work` if no error is kept. Payload sizes are the same in each step. If a value is not finite on
        one rank, `out` is not finite on all ranks.
        """

    def figures(self) -> Tensor | None:
        """Return numbers about the last exchange that `commit` needs, (n,) of fp32 on the device; None if none.

        Equal on all ranks. The first is finite if and only if the result is. The caller reads those of all buckets at
        once, so that the host waits for the device once a step.
        """
        return None

    def commit(self, figures: Sequence[float], *, applied: bool) -> None:
        """Keep the changes of the last exchange to the state; drop them if the step was not applied.

        `figures`: the values of `figures`; empty for None.
        """
        return

    def rescale(self, factor: float) -> None:
        """Multiply the residual, because gradients are multiplied by `factor` from now on (fp16's loss scale)."""
        return

    def synchronize_state(self) -> None:
        """Make state that differs between ranks equal on all, with the same sum. Collective: yes."""
        return

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state by ``parameter/kind``, not copied; equal on all ranks after `synchronize_state`."""
        return {}

    def synchronized_state(self) -> dict[str, Tensor]:
        """Return what `state_dict` would return after `synchronize_state`, without a change. Collective: yes.

        It is valid until the next `pack`.
        """
        return self.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor], ranks: int) -> None:
        """Load the state of the bucket's parameters, saved by a job of world size `ranks`.

        Missing state is initialized. The sum of residuals over ranks stays the same.
        """
        return

    def add_buffer(self, length: int | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a flat buffer of zeros, by default of the bucket's length, and list it in `buffers`."""
        self._buffers.append(self.shape.zeros(length, dtype))
        return self._buffers[-1]

    def buffers(self) -> list[Tensor]:
        """Return the buffers, without scratch memory for single pieces."""
        return [self.work, *self._buffers]
