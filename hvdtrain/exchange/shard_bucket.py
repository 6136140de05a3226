"""A bucket of gradients that are summed at their owners. After the update, their parameters are gathered from there.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hvdtrain.comm.base import Comm, Handle, kept_for_stream
from hvdtrain.compression.base import BucketShape, Part, Phases
from hvdtrain.errors import TaskError
from hvdtrain.exchange.bucket import Bucket
from hvdtrain.exchange.buckets import Layout
from hvdtrain.plan.shards import Rows, divide
from hvdtrain.state.exchange_state import Owned
from hvdtrain.state.pieces import Place


@dataclass(frozen=True)
class Shard:
    """Rows of a parameter in the flat bucket, and the parameter of their owner's optimizer."""

    rows: Rows
    part: Part
    owned: nn.Parameter | None  # on the owner only

    @property
    def exact(self) -> Tensor:
        """The owner's values."""
        assert self.owned is not None
        return self.owned.detach()


@dataclass(frozen=True)
class Shared:
    """What ranks divide in a bucket."""

    layout: Layout  # parameters and their order; it is equal on all ranks
    comm: Comm  # the ranks
    whole: list[bool]  # for each parameter, whether one rank must own all of it
    first: int = 0  # as of `divide`
    on_host: bool = False  # whether owned parameters, and their gradients, are copies in the memory of the host
    by_rows: bool = False  # as of `divide`


class ShardBucket(Bucket):
    """Gradients of one dtype and device that a reduce-scatter sums, and their parameters, which an allgather spreads.

    The flat buffer has a segment of equal size for each rank. It exists from the first packed gradient until the sums
    have arrived; a rank keeps only the sums of its own segment. Owned parameters on a device are views of the model's.
    """

    def __init__(self, shared: Shared) -> None:
        self._comm, self._on_host = shared.comm, shared.on_host
        layout, comm, shape = shared.layout, shared.comm, shared.layout.shape
        shapes, item = [tuple(parameter.shape) for parameter in layout.parameters], shape.dtype.itemsize
        rows, self._segment = divide(shapes, comm.size, item, shared.whole, shared.first, by_rows=shared.by_rows)
        self._shards = [self._make_shard(layout, r) for r in rows]
        self._by_index: dict[int, list[Shard]] = {}
        for shard in self._shards:
            self._by_index.setdefault(shard.rows.index, []).append(shard)
        length = self._segment * comm.size
        # A large tensor that is divided evenly is sent without a copy.
        self._is_one_tensor = [math.prod(each) for each in shapes] == [length] and not any(shared.whole)
        self._own = [shard for shard in self._shards if shard.rows.rank == comm.rank]
        # Horovod cannot sum bfloat16 (horovod/horovod#4047).
        self._sum_dtype = torch.float32 if shape.dtype == torch.bfloat16 else shape.dtype
        self._work: Tensor | None = None
        self._summed: Tensor | None = None
        self._gather: tuple[Tensor, Handle] | None = None
        super().__init__(
            Layout(layout.parameters, BucketShape(shape.name, shape.parts, length, shape.dtype, shape.device)),
            1.0,
            as_views=True,
        )

    def _make_shard(self, layout: Layout, rows: Rows) -> Shard:
        parameter = layout.parameters[rows.index]
        own = rows.rank == self._comm.rank
        values = rows.of(parameter.detach())
        # A gradient needs the strides of its parameter, because torch's fused optimizers ignore strides.
        stride = None if values.is_contiguous() else values.stride()
        part = Part(layout.shape.parts[rows.index].name, values.shape, rows.start, stride)
        return Shard(rows, part, nn.Parameter(self._own_values(values)) if own else None)

    def _own_values(self, values: Tensor) -> Tensor:
        """Return the values of an owned parameter, from those of the model."""
        return _copy_to_host(values) if self._on_host else values

    def begin(self) -> None:
        """Start another pass with the parameters that are trained now; its sums are added to those before."""
        super().begin()
        self.missing = {i for i, parameter in enumerate(self.layout.parameters) if parameter.requires_grad}

    def clear(self) -> None:
        """Free the sums of the last step, and what was packed of it and not exchanged."""
        self._work = self._summed = None

    def _check_dense(self, index: int, gradient: Tensor | None) -> None:
        if gradient is not None and gradient.is_sparse:
            raise TaskError(
                f"the gradient of {self.layout.shape.parts[index].name} is sparse",
                expected="dense gradients, because the optimizer is divided among ranks",
                next_step="make it dense (nn.Embedding(sparse=False)), or do not divide the optimizer (shard: none)",
            )

    def _pack(self, index: int, gradient: Tensor | None, weight: float) -> None:
        self._check_dense(index, gradient)
        if gradient is not None and self._is_one_tensor and weight == 1.0 and gradient.dtype == self._sum_dtype:
            self._work = gradient.contiguous().view(-1)
            return
        if self._work is None:
            shape = self.layout.shape
            self._work = torch.empty(shape.length, dtype=self._sum_dtype, device=shape.device)
        for shard in self._by_index.get(index, ()):
            view = shard.part.view(self._work)
            if gradient is None:
                view.zero_()
            elif weight != 1.0:
                torch.mul(shard.rows.of(gradient), weight, out=view)
            else:
                view.copy_(shard.rows.of(gradient))

    def _exchange(self) -> Phases:
        if self._work is None:  # all parameters are frozen
            return
        sums = yield self._comm.reducescatter(self._work.view(self._comm.size, -1), name=self.layout.shape.name)
        self._work = None
        self._summed = sums.view(-1) if self._summed is None else self._summed.add_(sums.view(-1))

    def _trained(self) -> list[Shard]:
        """Return what this rank owns of the parameters that are trained in this step."""
        return [shard for shard in self._own if self.layout.parameters[shard.rows.index].requires_grad]

    def _sums(self) -> list[Tensor]:
        if self._summed is None:
            return []
        summed = kept_for_stream(self._summed)
        return [self._own_part(shard).view(summed).to(self.layout.shape.dtype) for shard in self._trained()]

    def _own_part(self, shard: Shard) -> Part:
        """Return the position of an owned shard in the segment of this rank."""
        return replace(shard.part, start=shard.part.start - self._comm.rank * self._segment)

    def set_gradients(self) -> list[Tensor]:
        """Make the sums the gradients of the owned parameters; return them."""
        sums = self._sums()
        if self._on_host:
            sums = [_copy_to_host(total) for total in sums]
        for shard, total in zip(self._trained(), sums, strict=True):
            assert shard.owned is not None
            shard.owned.grad = total
        return sums

    def shapes(self) -> list[torch.Size]:
        """Return the shapes of the whole parameters of the gradients that `set_gradients` returns."""
        return [self.layout.parameters[shard.rows.index].shape for shard in self._trained()]

    def owned(self) -> dict[str, Owned]:
        """Return what this rank owns of each parameter, by name."""
        found = {}
        for index, parameter in enumerate(self.layout.parameters):
            shards = self._by_index.get(index, [])
            owners = tuple(sorted({shard.rows.rank for shard in shards}))
            own = next((shard for shard in shards if shard.owned is not None), None)
            name = self.layout.shape.parts[index].name
            if own is None:
                found[name] = Owned(None, None, owners)
            else:
                shape, begin = tuple(parameter.shape), own.rows.begin
                place = Place(shape, (begin, *(0 for _ in shape[1:]))[: len(shape)], (self._comm.rank,))
                if own.rows.flat:
                    place = replace(place, offset=(0,) * len(shape), box=shape, first=begin)
                found[name] = Owned(own.owned, place, owners)
        return found

    def read_model(self) -> None:
        """Make owned parameters on the host equal to the model's, which were loaded."""
        for shard in self._own if self._on_host else ():
            shard.exact.copy_(self._model(shard))

    def _model(self, shard: Shard) -> Tensor:
        """Return the values of a shard in the model."""
        return shard.rows.of(self.layout.parameters[shard.rows.index].detach())

    def start_gather(self) -> None:
        """Start to send this rank's parameters to all ranks. Collective: yes."""
        shape = self.layout.shape
        sent = torch.empty(self._segment, dtype=shape.dtype, device=shape.device)
        for shard in self._own:
            self._own_part(shard).view(sent).copy_(shard.exact)
        self._gather = sent, self._comm.allgather(sent, name=f"{shape.name}/parameters")

    @property
    def is_trained(self) -> bool:
        """Whether a parameter of the bucket is trained now."""
        return any(parameter.requires_grad for parameter in self.layout.parameters)

    @property
    def exchange_bytes(self) -> int:
        """Memory of the exchange of gradients or parameters: of all ranks, and of this rank."""
        return (self._comm.size + 1) * self.segment_bytes

    @property
    def segment_bytes(self) -> int:
        """Memory of the gradients or parameters that this rank owns."""
        return self._segment * self.layout.shape.dtype.itemsize

    @property
    def kept_bytes(self) -> int:  # type: ignore[override]
        """Memory of the sums of this rank."""
        return 0 if self._summed is None else self._summed.nbytes

    def finish_gather(self) -> None:
        """Wait for the parameters of the other ranks, if they are under way."""
        if self._gather is None:
            return
        (_, handle), self._gather = self._gather, None
        received = handle.wait()
        others = [shard for shard in self._shards if shard.owned is None or self._on_host]
        if others:
            # In place: autograd then refuses a backward pass for which a parameter was read too early.
            torch._foreach_copy_(list(map(self._model, others)), [shard.part.view(received) for shard in others])

    def buffers(self) -> list[Tensor]:
        """Return the memory in use."""
        sent = [] if self._gather is None else [self._gather[0]]
        return [tensor for tensor in (self._work, self._summed, *sent) if tensor is not None]


def _copy_to_host(tensor: Tensor) -> Tensor:
    """Return a copy in the memory of the host; page-locked if the tensor is on a GPU, which is fast to copy."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor)
