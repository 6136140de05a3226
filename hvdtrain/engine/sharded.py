"""The engine that divides the optimizer's state, and the sums of gradients, among ranks: ZeRO-1 and ZeRO-2.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020. torch's
ZeroRedundancyOptimizer is not used: each rank sums all gradients with it, and it sends whole parameters one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.comm.base import Handle
from hvdtrain.compression.table import parse
from hvdtrain.engine.base import Loss
from hvdtrain.engine.coded_shards import CodedShards
from hvdtrain.engine.divisible import (
    UNDIVIDED,
    DividedEngine,
    refuse_one_rank,
    refuse_what_cannot_be_divided,
    use_owned,
    whole_parameters,
)
from hvdtrain.engine.gathers import Gathers
from hvdtrain.engine.parts import EngineParts
from hvdtrain.engine.schedule import Schedule
from hvdtrain.errors import ConfigError, TaskError
from hvdtrain.exchange.agreement import check_same_names
from hvdtrain.exchange.bucket_exchange import BucketQueue
from hvdtrain.exchange.buckets import Layout, assign_buckets, lay_out
from hvdtrain.exchange.preparation import prepare_exchange
from hvdtrain.exchange.shard_bucket import ShardBucket
from hvdtrain.plan.collectives import AT_ONCE, bucket_limit
from hvdtrain.plan.gradients import Gradient
from hvdtrain.plan.plan import Ranks
from hvdtrain.spans import Spans
from hvdtrain.state.pieces import Place


class ShardedEngine(DividedEngine):
    """Each rank owns rows of the parameters: it sums their gradients, and its optimizer updates only them.

    A bucket's gradients are summed at their owners while backward runs (reduce-scatter). After the update, an allgather
    for each bucket sends the parameters to all ranks, in the order of the forward pass, while the next one runs. A
    forward hook of each block, and of each module outside of blocks, waits for the parameters below it.

    With a compression, gradients and updates are sent encoded: see `CodedShards`.

    While it is open, the optimizer's groups contain the owned rows instead of the model's parameters.

    Args:
        parts: the parameters are equal on all ranks. If gradients are divided, those of each micro-batch are summed at
            their owners at once (ZeRO-2): one exchange for each, and a rank never holds all gradients. In an elastic
            job, ranks may own nothing, because there are many, or everything, because there is one.
        bucket_bytes: size limit of a bucket.
        weight: applied to each gradient before the exchange.
        name: prefix of the collectives' names.

    Attributes:
        on_gradient: called with the name and each parameter that gets a gradient; set it before `refresh`.

    Errors:
        ConfigError: the model or the optimizer cannot be divided among the ranks.
    """

    def __init__(self, parts: EngineParts, bucket_bytes: int, *, weight: float = 1.0, name: str = "gradients") -> None:
        optimizer, comm, named = parts.optimizer, parts.comm, parts.parameters
        super().__init__(optimizer, parts.model, comm, name)
        self._weight, self._offload = weight, parts.plan.offload
        self._spans = parts.spans or Spans()
        self._bucket_bytes = bucket_bytes
        self._buckets: list[ShardBucket] = []
        self._bucket_of: dict[nn.Parameter, ShardBucket] = {}
        self._hooks: list[Any] = []
        self._names: dict[nn.Parameter, str] = {}
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._trained: list[bool] = []
        self._to_deliver: dict[str, Tensor] = {}  # residuals, in this step
        self._used: set[str] = set()  # parameters with a gradient in this step
        self._sums_each_pass = parts.plan.shard == "gradients"
        self._schedule = Schedule()
        self._is_exchanging = False
        compression = parse(parts.plan.compression)
        self.compression, self._coded = parts.plan.compression, None
        if not compression.exact:
            self._coded = self.residuals = CodedShards(
                compression, comm, self._undelivered, self.complete, self._place_of, on_host=self._offload
            )
        self.on_gradient: Callable[[str, nn.Parameter], None] = self._on_gradient
        self._most: Handle | None = None
        refuse_what_cannot_be_divided(parts.model, named, UNDIVIDED)
        self._add(named)
        owners = {rank for owned in self.owned().values() for rank in owned.owners}
        if len(owners) < comm.size and not parts.plan.elastic:
            raise ConfigError(
                "the model has too few parameters to divide its optimizer among the ranks",
                expected="at least one tensor, or 65,536 elements of a larger tensor, for each rank",
                found=f"parameters for {len(owners)} of {comm.size} ranks",
                next_step=f"use fewer ranks, or {UNDIVIDED}",
            )
        use_owned(optimizer, self._names, self._owned)
        self._gathers = self._make_gathers()

    def _add(self, named: list[tuple[str, nn.Parameter]]) -> None:
        """Make buckets of these parameters; frozen ones are in buckets of their own."""
        for is_trained in (True, False):
            part = [(name, p) for name, p in named if p.requires_grad == is_trained and p.numel()]
            prefix = f"{self._name}/{len(self._buckets)}" if self._buckets else self._name
            for layout in lay_out(assign_buckets(part, self._bucket_bytes), dict(part), prefix):
                bucket = self._make_bucket(layout, whole_parameters(self.optimizer, layout.parameters))
                self._buckets.append(bucket)
                self._bucket_of |= dict.fromkeys(layout.parameters, bucket)
        self._names |= {parameter: name for name, parameter in named}
        # More are exchanged at a time while memory is free that the sums will take.
        self._limit_bytes = AT_ONCE * self._bucket_bytes + sum(bucket.segment_bytes for bucket in self._buckets)
        self._queue = BucketQueue(self._buckets, self._weight, self._spans, self._limit_bytes)
        self._owned = {name: owned for bucket in self._buckets for name, owned in bucket.owned().items()}

    def _make_bucket(self, layout: Layout, whole: list[bool]) -> ShardBucket:
        if self._coded is not None:
            return self._coded.make_bucket(layout, whole)
        return ShardBucket(layout, self._comm, whole, first=len(self._buckets), on_host=self._offload)

    def _place_of(self, name: str) -> Place | None:
        return self._owned[name].place

    def _make_gathers(self) -> Gathers:
        return Gathers(self._model, self._bucket_of, self._spans, self._limit_bytes)

    def begin(self, micro_batches: int) -> None:
        """Clear gradients. Collective: yes, if parameters were added, frozen or freed since the last step."""
        self.refresh()
        self.optimizer.zero_grad()
        for parameter in self._names:
            parameter.grad = None
        self._gathers.begin()
        self._schedule.begin(micro_batches)
        self._most = None
        self._used.clear()
        self.begin_exchange()

    def begin_exchange(self) -> None:
        """Free the sums of the last step, and expect the gradients of another one."""
        self.clear()
        self._queue.begin()
        self._to_deliver = dict(self._undelivered.sums) if self._comm.rank == 0 else {}

    def clear(self) -> None:
        """Free the sums."""
        for bucket in self._buckets:
            bucket.clear()

    def refresh(self) -> None:
        """Look for parameters that were added, frozen or freed. Collective: yes, if there are some.

        Errors:
            TaskError: the optimizer has a new parameter from outside the model.
            LaunchError: the ranks train different parameters; on every rank.
        """
        known = {owned.parameter for owned in self._owned.values()}
        added = {p for group in self.optimizer.param_groups for p in group["params"] if p not in known}
        if added:
            self.complete()
            named = [(name, p) for name, p in self._model.named_parameters() if p in added]
            if len(named) < len(added):
                raise TaskError(
                    "a parameter was added to the optimizer that is not one of the model",
                    expected="parameters of the model, because the optimizer is divided among ranks",
                    next_step="add it to the model, too; in your own loop, make the optimizer of all parameters",
                )
            for group, before in zip(self.optimizer.param_groups, self._groups, strict=False):
                before += [p for p in group["params"] if p in added]
            self._groups += [list(group["params"]) for group in self.optimizer.param_groups[len(self._groups) :]]
            self._add(named)
            use_owned(self.optimizer, self._names, self._owned)
            self._gathers.close()
            self._gathers = self._make_gathers()
        trained = [parameter.requires_grad for parameter in self._names]
        if trained != self._trained:
            self._trained = trained
            self._remove_hooks()
            for parameter, name in self._names.items():
                if _is_trained(parameter):
                    on_gradient: Any = partial(self.on_gradient, name)
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(on_gradient))  # type: ignore[no-untyped-call]
            names = [name for parameter, name in self._names.items() if parameter.requires_grad]
            check_same_names(self._comm, names, name=f"{self._name}/trained")

    def forward(self, call: Callable[[], Loss]) -> Loss:
        """Run a forward pass; the first one finds parameters that are used before their module."""
        with self._gathers.watch():
            return call()

    def _on_gradient(self, name: str, parameter: nn.Parameter) -> None:
        self._used.add(name)
        if self._is_exchanging:
            self.add_gradient(name, parameter)

    def add_gradient(self, name: str, parameter: nn.Parameter) -> None:
        """Take the gradient of a parameter, and exchange each bucket as soon as it is full."""
        self._add_residual(name, parameter)
        self._queue.add_gradient(name)

    def _add_residual(self, name: str, parameter: nn.Parameter) -> None:
        """Add what an earlier exchange with a compression has not delivered."""
        if (residual := self._to_deliver.pop(name, None)) is not None:
            residual = residual.to(parameter.device, parameter.dtype) / self._weight
            parameter.grad = residual if parameter.grad is None else parameter.grad.add_(residual)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`; in the last pass, or each pass, exchange each bucket as soon as it is full."""
        if self._sums_each_pass and self._schedule.begun:
            self.end_pass()
        self._count_passes()
        self._schedule.count()
        self._is_exchanging = self._sums_each_pass or not self._schedule.left
        torch.autograd.backward(loss)
        self._is_exchanging = False

    def _count_passes(self) -> None:
        """Begin to exchange the numbers of passes, once a step. Collective: yes."""
        if self._sums_each_pass and self._most is None:
            self._most = self._comm.allgather(torch.tensor([self._schedule.left]), name=f"{self._name}/passes")

    def end_pass(self) -> None:
        """Wait for the sums of a pass, and begin the next one. Its sums are added to them. Collective: yes."""
        self._queue.wait()
        self._queue.begin()

    def finish(self) -> list[Tensor]:
        """Wait for the sums of what this rank owns. Collective: yes."""
        self.complete()  # of parameters that no forward pass has used
        self._count_passes()
        if self._most is not None:  # ranks with fewer micro-batches take part with zeros
            for _ in range(self._schedule.begun, int(self._most.wait().max())):
                if self._schedule.begun:
                    self.end_pass()
                self._schedule.count()
        if self._to_deliver:
            for parameter, name in self._names.items():
                if parameter.requires_grad and self._queue.is_missing(name):
                    self._add_residual(name, parameter)
        return self._queue.finish()

    def unused(self) -> list[bool]:
        """Return for each trained parameter whether it has no gradient."""
        return [name not in self._used for name in self._trained_names()]

    def _may_owe(self) -> bool:
        return self.keeps_error or bool(self._undelivered.sums)

    def _trained_names(self) -> list[str]:
        return [name for parameter, name in self._names.items() if _is_trained(parameter)]

    def _whole_shapes(self) -> Iterable[Sequence[int]]:
        return [shape for bucket in self._buckets for shape in bucket.shapes()]

    def step(self) -> None:
        """Update what this rank owns, and start to send it to all ranks. Collective: yes."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.spread()

    def spread(self) -> None:
        """Start to send what this rank's optimizer has updated to all ranks. Collective: yes."""
        if self._coded is not None:
            self._coded.begin_spread(getattr(self.optimizer, "found_inf", None))  # set if the device decides
        self.clear()
        # Now: parameters may be frozen before the last gather starts.
        self._gathers.start([bucket for bucket in reversed(self._buckets) if bucket.is_trained])

    def complete(self) -> None:
        """Wait for the parameters that other ranks have updated."""
        self._gathers.finish()

    def take_changes(self) -> None:
        """Use what a program has written to the model's parameters since the last step."""
        if self._coded is not None:  # else the optimizer's are in the same memory
            self._coded.take_changes()

    def load_state_dict(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Load residuals, after the model's parameters were loaded."""
        for bucket in self._buckets:
            bucket.read_model()
        super().load_state_dict(tensors, values)

    @property
    def keeps_error(self) -> bool:
        """Whether the compression uses error feedback."""
        return self._coded is not None and self._coded.keeps_error

    def parameters_by_collective(self) -> dict[str, list[str]]:
        """Return the names of the parameters by bucket."""
        return self._queue.parameter_names()

    def buffers(self) -> list[Tensor]:
        """Return the memory of the buckets."""
        return [buffer for bucket in self._buckets for buffer in bucket.buffers()]

    def close(self) -> None:
        """Remove the hooks, and give the optimizer the model's parameters again, without their state."""
        self._remove_hooks()
        self._gathers.close()
        for group, parameters in zip(self.optimizer.param_groups, self._groups, strict=True):
            group["params"] = parameters
        for owned in self._owned.values():
            if owned.parameter is not None:
                self.optimizer.state.pop(owned.parameter, None)

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _is_trained(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad and bool(parameter.numel())


def make_sharded(parts: EngineParts, **options: Any) -> ShardedEngine:
    """Make the engine; `options` are those of `ShardedEngine`.

    Errors:
        ConfigError: there is one rank, in a job that is not elastic; or the model or the optimizer cannot be divided.
    """
    if not parts.plan.elastic:
        refuse_one_rank(parts.comm, f"--parallel.shard {parts.plan.shard}", "optimizer", "--parallel.shard none")
    compression = parse(parts.plan.compression)
    prepare_exchange(compression, parts.comm, parts.variables)
    trained = [(name, p) for name, p in parts.parameters if p.requires_grad]
    whole = whole_parameters(parts.optimizer, [p for _, p in trained])
    gradients = [
        Gradient(name, tuple(p.shape), str(p.dtype).removeprefix("torch."), whole=each)
        for (name, p), each in zip(trained, whole, strict=True)
    ]
    ranks = Ranks(parts.comm.size, parts.comm.local_size)
    return ShardedEngine(parts, bucket_limit(parts.plan, gradients, ranks, compression), **options)
