"""Gradients summed over ranks in flat buckets, each exchanged in place as soon as backward has filled it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from hvdtrain.comm.base import Comm, Handle
from hvdtrain.errors import TaskError
from hvdtrain.exchange.buckets import Layout, Slot, lay_out
from hvdtrain.spans import EXCHANGE, Spans

BUCKET_BYTES = 32 << 20
"""Where ranks fill their cores, an exchange beside backward only makes both wait: 1.05 of a step without exchange with
buckets of 8 MiB, 1.03 with one of 27 MiB (the default model, 2 ranks on 2 cores)."""

WIRE: Mapping[str, Mapping[torch.dtype, torch.dtype]] = {
    "none": {torch.bfloat16: torch.float32},
    "fp16": {torch.bfloat16: torch.float32, torch.float32: torch.float16, torch.float64: torch.float16},
}
"""By compression, the dtype that gradients travel as where it is not their own. Horovod cannot sum bfloat16
(horovod/horovod#4047), and fp16 lacks its range: it travels as fp32."""


class _Bucket:
    """One flat buffer under way.

    Attributes:
        layout: what lies where.
        flat: gradients, in their own dtype.
        wire: what is exchanged: `flat` itself, or a buffer of another dtype.
        ready: names of the slots that hold this step's gradient.
        handle: of the exchange, once started.
        started_ns: when that was, by the recorder's clock.
    """

    def __init__(self, layout: Layout, dtype: torch.dtype) -> None:
        self.layout = layout
        self.flat = torch.zeros(layout.length, dtype=layout.dtype, device=layout.device)
        self.wire = self.flat if dtype == layout.dtype else torch.zeros_like(self.flat, dtype=dtype)
        self.places = {slot.name: slot.view(self.wire) for slot in layout.slots}
        self.views = {slot.name: slot.view(self.flat) for slot in layout.slots}
        self.ready: set[str] = set()
        self.handle: Handle | None = None
        self.started_ns = 0

    def put(self, slot: Slot) -> None:
        """Copy a gradient to its place, zero where there is none, and let the parameter's own memory go."""
        gradient = slot.parameter.grad
        if gradient is None:
            self.places[slot.name].zero_()
        else:
            refuse_sparse(slot.name, gradient)
            self.places[slot.name].copy_(gradient)
        slot.parameter.grad = self.views[slot.name]
        self.ready.add(slot.name)


def refuse_sparse(name: str, gradient: Tensor) -> None:
    """See that a gradient is dense.

    Errors:
        TaskError: it is sparse.
    """
    if gradient.is_sparse:
        raise TaskError(
            f"the gradient of {name} is sparse",
            expected="dense gradients",
            next_step="make the embedding with sparse=False",
        )


class Reducer:
    """Sums gradients over ranks; afterwards each is a view of a flat buffer.

    A gradient is first made where autograd makes it, then copied once, hot, into its bucket. Accumulating into views
    from the start would cost a zeroing and an addition a step instead.

    Args:
        named_parameters: equal on all ranks, in the same order.
        comm: the ranks.
        compression: a key of `WIRE`.
        bucket_bytes: largest bucket.
        spans: told of each exchange, from its start until it was waited for.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, nn.Parameter]],
        comm: Comm,
        compression: str = "none",
        bucket_bytes: int = BUCKET_BYTES,
        spans: Spans | None = None,
    ) -> None:
        self._comm = comm
        self._spans = spans or Spans()
        self._collecting = False
        wire = WIRE[compression]
        layouts = lay_out(named_parameters, bucket_bytes)
        self._buckets = [_Bucket(layout, wire.get(layout.dtype, layout.dtype)) for layout in layouts]
        self._hooks = [
            slot.parameter.register_post_accumulate_grad_hook(self._hook(number, slot))  # type: ignore[no-untyped-call]
            for number, bucket in enumerate(self._buckets)
            for slot in bucket.layout.slots
        ]

    def begin(self) -> None:
        """Start a step: gradients must have been cleared."""
        for bucket in self._buckets:
            bucket.ready.clear()
            bucket.handle = None
        self._collecting = False

    def collect(self) -> None:
        """The next backward pass is the last of the step: exchange what it finishes."""
        self._collecting = True

    def finish(self) -> list[Tensor]:
        """Exchange what is left, wait for all; the summed gradients, views of the buckets. Collective: yes."""
        self._collecting = False
        for number, bucket in enumerate(self._buckets):
            if bucket.handle is None:
                for slot in bucket.layout.slots:
                    if slot.name not in bucket.ready:
                        bucket.put(slot)
                self._start(number)
        for number, bucket in enumerate(self._buckets):
            assert bucket.handle is not None
            bucket.handle.wait()
            self._spans.record("exchange", bucket.started_ns, EXCHANGE + number)
            if bucket.wire is not bucket.flat:
                bucket.flat.copy_(bucket.wire)
        # Views, not whole buckets: a norm over 30 MB summed in fp32 is off by 2e-4, that of the parts by 6e-6.
        return [view for bucket in self._buckets for view in bucket.views.values()]

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()

    def carried(self) -> dict[str, list[str]]:
        """Names of the parameters whose gradients each collective carries, by the collective's name."""
        return {_collective(n): [slot.name for slot in b.layout.slots] for n, b in enumerate(self._buckets)}

    def buffers(self) -> list[Tensor]:
        """The memory that buckets take."""
        return [buffer for bucket in self._buckets for buffer in (bucket.flat, bucket.wire)]

    def _hook(self, number: int, slot: Slot):  # type: ignore[no-untyped-def]
        bucket = self._buckets[number]

        def on_gradient(parameter: Tensor) -> None:
            if not self._collecting:
                return
            if slot.name in bucket.ready:
                raise TaskError(
                    f"{slot.name} got its gradient a second time in one backward pass, when it was on its way already",
                    next_step="checkpoint activations with use_reentrant=False, and run backward once a loss",
                )
            bucket.put(slot)
            if len(bucket.ready) == len(bucket.layout.slots):
                self._start(number)

        return on_gradient

    def _start(self, number: int) -> None:
        bucket = self._buckets[number]
        bucket.started_ns = self._spans.now()
        bucket.handle = self._comm.allreduce(bucket.wire, name=_collective(number))


def _collective(number: int) -> str:
    """The name under which a bucket is exchanged."""
    return f"gradients/{number}"
