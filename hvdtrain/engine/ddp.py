"""The sums of gradients by torch's DistributedDataParallel."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from hvdtrain.comm.base import Comm
from hvdtrain.comm.torch_group import new_group
from hvdtrain.comm.torch_order import lost_rank, naming_lost_rank
from hvdtrain.compression.table import parse
from hvdtrain.engine.base import Engine
from hvdtrain.engine.divisible import sparse_gradients
from hvdtrain.engine.one_rank import OneRank
from hvdtrain.engine.parts import EngineParts
from hvdtrain.engine.sums import Loss
from hvdtrain.errors import TaskError
from hvdtrain.exchange.agreement import check_same_names
from hvdtrain.exchange.residuals import leave_out, residual_key
from hvdtrain.plan.collectives import DDP_MIB

_ONE_BUCKET_MIB = 2.0**40
_WARM_UP_PASSES = 2
"""Passes that torch's PowerSGD exchanges uncompressed: DDP makes its final buckets after the first."""

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class _Anchor(torch.autograd.Function):
    """Return the loss, and let backward reach every parameter, also those that it does not use, with no gradient.

    So DDP waits for no unused parameter, and does not search the graph for them. A rank without a micro-batch takes
    part with a loss that depends on no parameter.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *parameters: Tensor) -> Tensor:
        ctx.count = len(parameters)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], *[None] * ctx.count


class _Pass(nn.Module):
    """A forward pass, as the module that DDP wraps: the task calls its bare model, so names and state stay as they are.

    It has the trained parameters and no buffers: those are shared by others.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self.trained = nn.ParameterList(parameters)

    def forward(self, call: Callable[[], Loss]) -> Loss:
        loss, weight = call()
        return _Anchor.apply(loss, *self.trained), weight  # type: ignore[no-untyped-call]


class DdpSums(OneRank):
    """Exchanges gradients by DDP while the last backward of a step runs; else as on one rank.

    Passes before the last one exchange nothing, so that each rank may have its own number of passes. A rank without any
    runs an empty one when the step begins. DDP is made again when parameters are added or frozen, which all ranks must
    do in the same step.

    Args:
        compression: one that `plan.refusals` allows.

    Errors of a step: LostRankError if a rank is lost.
    """

    def __init__(
        self,
        optimized: Callable[[], list[tuple[str, nn.Parameter]]],
        comm: Comm,
        compression: str = "none",
        bucket_mib: float | None = None,
    ) -> None:
        super().__init__(optimized)
        self.compression = compression
        self._comm, self._bucket_mib = comm, bucket_mib or DDP_MIB
        chosen = parse(compression)
        self._dtype = _DTYPES.get(chosen.kind.name)
        self._rank = int(chosen.number) if chosen.kind.name == "powersgd" else 0  # of PowerSGD's matrices
        self._group = new_group(comm)
        self._power: PowerSGDState | None = None
        self._errors: dict[int, Tensor] = {}  # of PowerSGD, before the step
        self._ddp: DistributedDataParallel | None = None
        self._wrapped: list[tuple[str, nn.Parameter]] = []
        self._used: set[str] = set()  # parameters with a gradient in this step
        self._hooks: list[Any] = []
        self._under_way: list[tuple[str, Tensor, Tensor, dist.Work]] = []

    def begin(self) -> None:  # noqa: D102
        trained = [(name, parameter) for name, parameter in self._parameters if parameter.requires_grad]
        if [id(parameter) for _, parameter in trained] != [id(parameter) for _, parameter in self._wrapped]:
            self._wrap(trained)
        self._used.clear()
        if self._power is not None:
            self._errors = dict(self._power.error_dict)  # torch replaces these tensors, and does not change them
        if not self.schedule.left and trained:  # now: all ranks begin the collectives of a step in the same order
            nothing = torch.zeros((), device=self._wrapped[0][1].device)
            self.backward(partial(torch.autograd.backward, self.forward(lambda: (nothing, 0.0))[0]))

    def forward(self, call: Callable[[], Loss]) -> Loss:
        """Run a forward pass of a step within DDP."""
        if self._ddp is None:
            return call()
        with self._ddp.no_sync() if self.schedule.left > 1 else nullcontext():
            loss, weight = self._ddp(call)
        return loss, weight

    def backward(self, call: Callable[[], None]) -> None:
        """Run a backward pass; in the last one, exchange each bucket as soon as it is full."""
        with naming_lost_rank("the exchange of gradients"):
            call()

    def finish(self) -> list[Tensor]:  # noqa: D102
        for name, buffer, sent, work in self._under_way:
            try:
                work.wait()
            except RuntimeError as error:
                raise lost_rank(error, "the exchange of gradients") from error
            if sent is not buffer:
                buffer.copy_(sent)
            self._comm.in_flight.pop(name, None)
        self._under_way = []
        return super().finish()

    def unused(self) -> list[bool]:
        """Return for each trained parameter whether this rank has not used it: DDP gives all a gradient."""
        return [name not in self._used for name, _ in self._wrapped]

    def leave_out(self, numbers: Sequence[int]) -> None:
        """Remove the gradients of parameters that no rank has used, unless a residual is their sum."""
        for name, parameter in (self._wrapped[number] for number in numbers):
            leave_out(parameter, may_be_residual=self._rank > 0 or residual_key(name) in self._delivered)

    def commit(self, *, applied: bool) -> None:
        """Keep what PowerSGD did not send, or restore what it was before the step."""
        super().commit(applied=applied)
        if self._power is not None and not applied:
            self._power.error_dict = self._errors
            self._power.p_memory_dict.clear()  # they may hold nan; torch draws new ones, equal on all ranks
            self._power.q_memory_dict.clear()
        self._errors = {}

    def rescale(self, factor: float) -> None:
        """Multiply what PowerSGD did not send, too."""
        super().rescale(factor)
        for error in self._power.error_dict.values() if self._power is not None else ():
            error.mul_(factor)

    def buffers(self) -> list[Tensor]:
        """Return what PowerSGD did not send: gradients are views of DDP's buckets."""
        return [*self._power.error_dict.values()] if self._power is not None else []

    def close(self) -> None:
        """Free DDP and its group."""
        self._remove_hooks()
        self._ddp, self._wrapped = None, []
        dist.destroy_process_group(self._group)

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _wrap(self, trained: list[tuple[str, nn.Parameter]]) -> None:
        """Make DDP for the parameters that are trained now. Collective: yes."""
        self._ddp, self._wrapped = None, trained
        self._remove_hooks()
        for name, parameter in trained:  # `_Anchor` gives those that no pass uses None
            hook: Any = partial(self._note, name)
            self._hooks.append(parameter.register_hook(hook))  # type: ignore[no-untyped-call]
        check_same_names(self._comm, [name for name, _ in trained], name="ddp/parameters")
        if not trained:
            return
        # torch's PowerSGD waits for a collective in the callback of another. With several buckets, both threads of Gloo
        # may wait then, for ever.
        one_bucket = self._rank > 0 and trained[0][1].device.type == "cpu"
        # All ranks have equal parameters: DDP need not send them.
        self._ddp = DistributedDataParallel(
            _Pass([parameter for _, parameter in trained]),
            init_sync=False,
            process_group=self._group,
            bucket_cap_mb=_ONE_BUCKET_MIB if one_bucket else self._bucket_mib,
            gradient_as_bucket_view=True,
        )
        if self._rank:
            self._power = PowerSGDState(self._group, self._rank, start_powerSGD_iter=_WARM_UP_PASSES)
        exchange = self._exchange if self._power is None else self._exchange_by_powersgd
        self._ddp.register_comm_hook(None, lambda state, bucket: exchange(bucket))  # it checks annotations as objects

    def _note(self, name: str, gradient: Tensor | None) -> None:
        if gradient is not None:
            self._used.add(name)

    def _exchange(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Begin to sum a bucket; `finish` waits, so that backward does not."""
        buffer = bucket.buffer()
        sent = buffer if self._dtype is None else buffer.to(self._dtype)
        name = f"gradients/{bucket.index()}"
        self._comm.in_flight[name] = time.monotonic()
        work = dist.all_reduce(sent, group=self._group, async_op=True)
        assert work is not None
        self._under_way.append((name, buffer, sent, work))
        devices: Any = [buffer.device] if buffer.is_cuda else None
        complete: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        complete.set_result(buffer)
        return complete

    def _exchange_by_powersgd(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Sum a bucket by torch's PowerSGD, which takes the mean."""
        assert self._power is not None
        mean = powerSGD_hook(self._power, bucket)
        return mean.then(lambda done: done.value().mul_(self._comm.size))


def make_ddp(parts: EngineParts) -> Engine:
    """Make the engine. Collective: yes.

    Errors: TaskError: the model has sparse gradients, which DDP with a hook does not exchange.
    """
    for name in sparse_gradients(parts.model).values():
        raise TaskError(
            f"{name} has sparse gradients, which --parallel.engine ddp does not exchange",
            next_step="--parallel.engine horovod, or sparse=False",
            everywhere=True,
        )
    sums = DdpSums(parts.optimized, parts.comm, parts.plan.compression, parts.plan.bucket_mib)
    return Engine(parts.optimizer, sums)
