"""FSDP's all-gather and reduce-scatter by our communicator, with or without a compression.

Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", 2023, for the compression
in both directions.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from hvdtrain.comm.base import Comm, Handle, kept_for_stream
from hvdtrain.comm.torch_group import TorchComm
from hvdtrain.compression.coding import Coding
from hvdtrain.compression.table import parse
from hvdtrain.data.tree import Positions
from hvdtrain.engine.parts import EngineParts
from hvdtrain.exchange.buckets import prepare_exchange
from hvdtrain.exchange.in_order import PassSums
from hvdtrain.plan.collectives import AT_ONCE
from hvdtrain.spans import GATHER, Spans


class FsdpCollectives:
    """The collectives of all modules that FSDP divides.

    The all-gather of a module runs while the one before it computes. Its sum runs while backward continues: FSDP makes
    views of the result and does not read it, so `finish_pass` may wait for it.

    With a coding, a rank encodes all that it sends, also for itself: ranks compute with equal parameters, whichever
    rank owns them. Gradients are summed in fp32.

    Args:
        comm: the ranks that divide a module, unless it has others.
        coding: None to send values as they are.
        spans: records the waits for parameters in a step.
        copied: whether torch copies each sum at once, to the memory of the host: then it is waited for.
        in_order: whether gradients are added in the order of micro-batches, at the end of a step. Until then the sums
            that torch gets have no values.

    Attributes:
        parameter_names: names of the parameters in each collective, by its name.
        carried: names of the parameters that are in one.
        on_sum: called with the name of a module when a sum of its gradients has arrived.
    """

    def __init__(
        self, comm: Comm, coding: Coding | None, spans: Spans, *, copied: bool = False, in_order: bool = False
    ) -> None:
        self._comm, self._coding, self._spans, self._copied = comm, coding, spans, copied
        self._in_order, self._sums = in_order, dict[str, PassSums]()  # by module
        self._of_pass: dict[str, Tensor] = {}  # what the ranks have sent in this pass, by module
        self._totals: dict[str, Tensor] = {}  # the memory of the sums that torch has got last, by module
        self._is_step = False
        self._running: deque[_Running] = deque()
        self._summed: dict[str, int] = {}  # the memory of each sum of this pass, by module
        self.parameter_names: dict[str, list[str]] = {}
        self.carried: set[str] = set()
        self.on_sum: Callable[[str], object] = lambda module: None

    def use_in(
        self, modules: Mapping[str, FSDPModule], names: Mapping[str, list[str]], comms: Mapping[str, Comm]
    ) -> None:
        """Carry the collectives of these modules: the model, then its parts in the order in which forward uses them.

        `names` are those of the parameters of each; `comms`: the ranks that divide it, if they are others. Where that
        is one rank, torch calls no collective.
        """
        self._modules = [name for name in modules if names[name]]
        for name, module in modules.items():
            comm = comms.get(name, self._comm)
            if comm.size == 1:
                continue
            self.carried.update(names[name])
            module.set_custom_all_gather(_AllGather(self, f"parameters/{name}", comm))  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(_ReduceScatter(self, name, comm))  # type: ignore[arg-type]
            if names[name]:
                self.parameter_names |= {f"{kind}/{name}": names[name] for kind in ("parameters", "gradients")}
        prefetch_in_order(modules)

    def begin(self, positions: Positions | None = None, passes: int = 0) -> None:
        """Start a step; without positions, all ranks have `passes` micro-batches."""
        self._is_step = True
        if self._in_order:
            positions = positions or Positions.equal(passes, self._comm.size, in_turn=True)
            self._sums = {module: PassSums(positions) for module in self._modules}
            self._of_pass.clear()
            self._totals.clear()

    def begin_pass(self) -> None:
        """Start a backward pass."""
        self._summed.clear()

    def finish_pass(self) -> None:
        """Wait for all sums of the pass. Collective: yes."""
        self._wait()
        for module, sums in self._sums.items():
            sums.add(self._of_pass.pop(module, None))

    def _wait(self) -> None:
        while self._running:
            self._running.popleft().finish()

    def finish(self) -> None:
        """End a step: all sums have their values."""
        self._is_step = False
        for module, sums in self._sums.items():
            if (total := sums.total) is not None:
                self._totals[module].copy_(total)
        self._sums = {}

    def has_summed(self, gradient: Tensor) -> bool:
        """Return whether a gradient is a view of a sum of this pass, or a copy of one."""
        return self._copied or gradient.untyped_storage().data_ptr() in self._summed.values()

    def gather(self, name: str, own: Tensor, out: Tensor, comm: Comm) -> dist.Work:
        """Begin to gather `own` of each rank into `out`. Collective: yes."""
        # Parameters of several dtypes are gathered as bytes.
        coding = self._coding if own.is_floating_point() else None
        sent = own if coding is None else coding.encode(own.float().view(1, -1))

        def write(received: Tensor) -> None:
            if coding is None:
                out.set_(received)  # type: ignore[call-overload]
            else:
                coding.decode(received, out.view(comm.size, -1))

        return _Gathering(_Running(comm.allgather(sent, name=name), sent, write), self._span)

    def sum(self, module: str, given: Tensor, out: Tensor, comm: Comm) -> None:
        """Begin to sum the gradients of a module, and write this rank's shard to `out`. Collective: yes.

        `given` has a shard for each rank.
        """
        is_another = module in self._summed  # it ran several times: FSDP adds this sum to the first, now
        if is_another:
            self._wait()
        while len(self._running) >= AT_ONCE or (self._running and self._running[0].done()):
            self._running.popleft().finish()
        coding, shards = self._coding, given.view(comm.size, -1)
        # Horovod cannot sum bfloat16 (horovod/horovod#4047).
        is_short = shards.dtype == torch.bfloat16 or (self._in_order and shards.dtype == torch.float16)
        values = shards.float() if coding is not None or is_short else shards
        sent = values if coding is None else coding.encode(values)
        start = comm.reducescatter if coding is None and not self._in_order else comm.alltoall
        if self._in_order and not is_another:
            self._totals[module] = out.view(-1)

        def write(received: Tensor) -> None:
            if self._in_order:
                before = self._of_pass.get(module)
                self._of_pass[module] = received if before is None else before.add_(received)
            elif coding is None:
                out.copy_(received.view(-1))
            elif out.dtype == torch.float32:
                coding.sum(received, out)
            else:
                coding.sum(received, total := torch.empty_like(out, dtype=torch.float32))
                out.copy_(total)
            self.on_sum(module)

        self._running.append(_Running(start(sent, name=f"gradients/{module}"), sent, write))
        self._summed.setdefault(module, out.untyped_storage().data_ptr())
        if is_another or self._copied:
            self._wait()

    def _span(self) -> AbstractContextManager[object]:
        return self._spans(GATHER) if self._is_step else nullcontext()


def prefetch_in_order(modules: Mapping[str, FSDPModule]) -> None:
    """Let the gather of each module begin before the one in front of it runs; `modules` by name, in this order."""
    # Not by modules within blocks: where backward computes activations again, their forward pass comes late.
    blocks = [name for name in modules if not any(name.startswith(f"{other}.") for other in modules)]
    for name, following in itertools.pairwise(blocks):
        within = [other for other in modules if other.startswith(f"{name}.")]
        modules[name].set_modules_to_forward_prefetch([modules[other] for other in [*within, following]])


class _Running:
    """A collective under way, with what is sent, and what writes the result."""

    def __init__(self, handle: Handle, sent: Tensor, write: Callable[[Tensor], None]) -> None:
        self._handle, self._sent, self._write = handle, sent, write

    def done(self) -> bool:
        """Check whether `wait` would return at once."""
        return self._handle.done()

    def wait(self) -> Tensor:
        """Return what was received."""
        received = self._handle.wait()
        kept_for_stream(self._sent)
        return received

    def write(self, received: Tensor) -> None:
        """Write what was received."""
        with torch.no_grad():
            self._write(received)

    def finish(self) -> None:
        """Wait, and write the result."""
        self.write(self.wait())


class _Gathering(dist.Work):
    """An all-gather, as FSDP waits for it."""

    def __init__(self, running: _Running, span: Callable[[], AbstractContextManager[object]]) -> None:
        super().__init__()
        self._running: _Running | None = running
        self._span = span

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Wait, and write the parameters of all ranks."""
        if self._running is not None:
            with self._span():
                received = self._running.wait()
            self._running.write(received)
            self._running = None
        return True


class _OfModule:
    """A collective of one module, and what allocates the memory that FSDP copies into and out of."""

    def __init__(self, collectives: FsdpCollectives, name: str, comm: Comm) -> None:
        self._collectives, self._name, self._comm = collectives, name, comm

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory of any content."""
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_OfModule):
    """The all-gather of one module: torch's protocol `AllGather`."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work:
        """Begin. FSDP waits for what is returned, also without `async_op`."""
        return self._collectives.gather(self._name, input_tensor, output_tensor, self._comm)


class _ReduceScatter(_OfModule):
    """The reduce-scatter of one module: torch's protocol `ReduceScatter`."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Begin; `FsdpCollectives.finish_pass` waits."""
        assert op == dist.ReduceOp.SUM and not async_op
        self._collectives.sum(self._name, input_tensor, output_tensor, self._comm)


def make_collectives(parts: EngineParts) -> FsdpCollectives | None:
    """Return the collectives by our communicator; None where torch's are used: uncompressed on GPUs or by torchrun."""
    device, chosen = parts.device, parse(parts.plan.compression)
    coding = chosen.load_coding(device)
    in_order = parts.plan.bits
    if coding is None and not in_order and (device.type != "cpu" or isinstance(parts.comm, TorchComm)):
        return None
    prepare_exchange(chosen, parts.comm, parts.variables)
    return FsdpCollectives(parts.comm, coding, parts.spans or Spans(), copied=parts.plan.offload, in_order=in_order)
