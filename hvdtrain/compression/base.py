"""The contract of a compressor: how one bucket of gradients is summed over ranks, and what its encoding leaves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hvdtrain.comm.base import Comm, Handle
from hvdtrain.compression import sizes

Phases: TypeAlias = Generator[Handle, Tensor, None]
"""A collective is yielded when it has been started; the generator goes on with its result once that is there."""


def drive(phases: Phases) -> None:
    """Take an exchange to its end, waiting for one collective after the other."""
    result: Any = None  # a generator begins with that
    with suppress(StopIteration):
        while True:
            result = phases.send(result).wait()


@dataclass(frozen=True)
class Part:
    """The place of one parameter's gradient in a bucket.

    Attributes:
        name: of the parameter.
        shape: of the gradient.
        start: first element in the bucket.
        stride: of the gradient in the bucket, in elements, one for each dimension; row-major by default.
    """

    name: str
    shape: torch.Size
    start: int
    stride: tuple[int, ...] | None = None

    def view(self, flat: Tensor) -> Tensor:
        """The part's place in `flat`, in the parameter's shape."""
        place = flat[self.start : self.start + self.shape.numel()]
        return place.view(self.shape) if self.stride is None else place.as_strided(self.shape, self.stride)

    @property
    def stored_shape(self) -> torch.Size:
        """The sizes of the dimensions in the order in which the bucket stores them, outermost first."""
        if self.stride is None:
            return self.shape
        return torch.Size([size for _, size in sorted(zip(self.stride, self.shape, strict=True), key=lambda d: -d[0])])


@dataclass(frozen=True)
class BucketShape:
    """What a compressor is made for: gradients of one dtype and device that lie in one flat buffer.

    Attributes:
        name: what the names of its collectives begin with; no other bucket's do.
        parts: ascending by place; elements between them are gaps, which hold zero.
        length: elements, gaps included.
        dtype: of the gradients.
        device: of the gradients.
    """

    name: str
    parts: tuple[Part, ...]
    length: int
    dtype: torch.dtype
    device: torch.device

    @property
    def sizes(self) -> sizes.Bucket:
        """What the sizes of its payloads depend on."""
        dtype = str(self.dtype).removeprefix("torch.")
        return sizes.Bucket([tuple(part.stored_shape) for part in self.parts], dtype, self.length)

    def zeros(self, length: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """A flat buffer on the bucket's device; without arguments, one that holds the bucket."""
        return torch.zeros(self.length if length is None else length, dtype=dtype or self.dtype, device=self.device)


class Compressor(ABC):
    """Sums one bucket over ranks; made once for a bucket, its buffers too.

    Law, where errors are kept, to rounding, over all ranks: ``sum(work before) - sum(work after) == out``. Of a second
    encoding (by the rank that owns a share of the sum) the error is left with that owner. Where errors are not kept,
    ``sum(work before) == out`` to the tolerance of the compressor's line in `table`.

    Attributes:
        shape: of the bucket.
        comm: the ranks.
        keeps_error: whether `exchange` leaves in `work` what of it was not delivered.
        work: where gradients are packed: at least ``shape.length`` elements of a dtype that the compressor chooses.
        places: by part, its view of `work`.
    """

    work: Tensor
    places: list[Tensor]

    def __init__(self, shape: BucketShape, comm: Comm, *, keep_error: bool = False) -> None:
        self.shape = shape
        self.comm = comm
        self.keeps_error = keep_error
        self.hold(self.make_work())

    def make_work(self) -> Tensor:
        """A buffer of zeros that can be `work`."""
        return self.shape.zeros()

    def hold(self, work: Tensor) -> None:
        """Make a buffer of `make_work` the one to pack into."""
        self.work = work
        self.places = [part.view(work) for part in self.shape.parts]

    def make_out(self) -> Tensor:
        """Return a buffer for the sums: `work` itself where `exchange` may overwrite it, to save memory."""
        in_place = not self.keeps_error and self.work.dtype == self.shape.dtype and len(self.work) == self.shape.length
        return self.work if in_place else self.shape.zeros()

    def pack(self, index: int, gradient: Tensor | None, weight: float = 1.0) -> None:
        """Put the gradient of part `index` times `weight` into its place, zero where there is none."""
        place = self.places[index]
        if gradient is None:
            place.zero_()
        elif weight != 1.0:
            torch.mul(gradient, weight, out=place)
        elif gradient.data_ptr() != place.data_ptr():
            place.copy_(gradient)

    @abstractmethod
    def exchange(self, out: Tensor) -> Phases:
        """Write the sum over ranks of `work` to `out`: (length,) of the bucket's dtype. Collective: yes.

        `out` may be `work` where no error is kept. Payload sizes are the same in each step. A value that is not finite
        on any rank leaves `out` not finite on all.
        """

    def finite(self) -> bool:
        """Whether what the last exchange brought is finite: equal on all ranks.

        May say so without having looked where no state depends on it. Waits for the device.
        """
        return True

    def commit(self, *, applied: bool) -> None:
        """Keep what the last exchange changed in the state; where the step was not applied, forget it."""
        return

    def rescale(self, factor: float) -> None:
        """Gradients are multiplied by `factor` from now on (fp16's loss scale has changed): so is what was kept."""
        return

    def synchronize_state(self) -> None:
        """Make what of the state differs between ranks the same on all, its sum kept. Collective: yes."""
        return

    def state_dict(self) -> dict[str, Tensor]:
        """The state by ``parameter/what``, without copying; equal on all ranks after `synchronize_state`."""
        return {}

    def synchronized_state(self) -> dict[str, Tensor]:
        """What `state_dict` would give after `synchronize_state`, with nothing changed. Collective: yes.

        To be read before the next `pack`.
        """
        return self.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor], ranks: int) -> None:
        """Take over what `state`, saved by a job of so many ranks, holds of the bucket's parameters.

        What it lacks starts anew. What was each rank's own keeps its sum over ranks.
        """
        return

    def buffers(self) -> list[Tensor]:
        """The memory it takes."""
        return [self.work]
