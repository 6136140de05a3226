"""The sums of ranks that hold or update parts of a model, over those that hold copies of each part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from hvdtrain.comm.base import Handle
from hvdtrain.comm.torch_order import naming_lost_rank
from hvdtrain.engine.coded_shards import CodedShards
from hvdtrain.engine.divisible import DividedSums, norm_by_row
from hvdtrain.engine.gathers import Gathers
from hvdtrain.engine.layout import Layout
from hvdtrain.engine.parts import EngineParts
from hvdtrain.engine.sums import Loss
from hvdtrain.exchange.at_owners import AtOwners
from hvdtrain.exchange.in_order import Leaves
from hvdtrain.spans import Spans
from hvdtrain.state.divided import local, on_stages
from hvdtrain.state.exchange_state import Owned

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class AmongCopies(DividedSums):
    """Sums the gradient of each part over the ranks that hold copies of it, while the last backward pass runs.

    Hooks of the parameters tell when a gradient is complete; its exchange begins when its bucket is full. Where copies
    divide the update (ZeRO), each rank owns rows: it has their sums, and its optimizer updates only them. Then they are
    sent to the other copies in the order of the forward pass, while the next one runs; see `Gathers`. With ZeRO-2 the
    sums of each pass are at their owners, and a rank never holds all gradients.

    While it is open, the optimizer's groups contain what this rank updates instead of the model's parameters.

    Args:
        parts: the parameters are equal on all ranks.
        layout: what this rank holds.
        coded: what ZeRO with a compression keeps.
        overlaps: whether exchanges may run during passes, and gathers during forward passes.
        name: prefix of the collectives' names.
        weight: applied to each gradient before the exchange, which the exchanges of the layout know.
        leaves: add the passes in the order of their positions; None to let autograd add them.

    Attributes:
        on_gradient: called with the name and each parameter that gets a gradient; set it before `refresh`.
    """

    def __init__(
        self,
        parts: EngineParts,
        layout: Layout,
        *,
        coded: CodedShards | None = None,
        overlaps: bool = True,
        name: str = "gradients",
        weight: float = 1.0,
        leaves: Leaves | None = None,
    ) -> None:
        super().__init__(parts.model, parts.comm)
        self.leaves = leaves
        self.compression, self.uniform_passes = parts.plan.compression, layout.divides_model
        self._optimizer, self._name = parts.optimizer, name
        self._layout, self._spans = layout, parts.spans or Spans()
        self._weight, self._overlaps, self._coded = weight, overlaps, coded
        if coded is not None:
            coded.undelivered, coded.complete, coded.owned = self._undelivered, self.complete, self.owned
            self.residuals = coded
        self._sums_each_pass = parts.plan.shard == "gradients"
        self.on_gradient: Callable[[str, nn.Parameter], None] = self._on_gradient
        self._used: set[str] = set()  # parameters with a gradient in this step
        self._handed: set[str] = set()  # those with a gradient that an exchange has, or the optimizer
        self._owed: set[str] = set()  # those with a residual that this step has not delivered yet
        self._most: Handle | None = None  # the numbers of passes of all ranks
        self._is_running = False  # a backward pass
        self._trained: list[bool] = []
        self._hooks: list[Any] = []
        self._gathers = self._make_gathers()

    def _make_gathers(self) -> Gathers:
        self._divided = [each for each in self._layout.every if isinstance(each, AtOwners)]
        bucket_of = {
            self._layout.parameters[name]: bucket for each in self._divided for name, bucket in each.bucket_of().items()
        }
        limit = sum(each.limit_bytes for each in self._divided)
        return Gathers(self._model, bucket_of, self._spans, limit)

    def owned(self) -> Mapping[str, Owned]:  # noqa: D102
        return self._layout.owned

    def begin(self) -> None:
        """Start a step, with parameters that have arrived where a pass may use them before their module."""
        for parameter in self._layout.parameters.values():
            parameter.grad = None
        self._gathers.begin()
        self._most = None
        self.begin_exchange()

    def refresh(self) -> None:
        """Look for parameters that were added, frozen or freed. Collective: yes, if there are some.

        Errors:
            TaskError: the layout cannot take them.
            LaunchError: the ranks train different parameters; on every rank.
        """
        added = self._layout.find_added(self.complete)
        trained = [parameter.requires_grad for parameter in self._layout.parameters.values()]
        if trained != self._trained:
            self._trained = trained
            self._layout.use_trained()
            self._remove_hooks()
            for name in self._layout.exchanges:
                hook: Any = partial(self.on_gradient, name)
                parameter = self._layout.parameters[name]
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        if added:
            self._gathers.close()
            self._gathers = self._make_gathers()

    def begin_exchange(self) -> None:
        """Free the sums of the last step, and expect the gradients of another one."""
        if self.leaves is not None:
            self.leaves.begin(self.positions, self.schedule.left)
        for exchange in self._layout.every:
            exchange.begin()
        self._used.clear()
        self._handed.clear()
        self._owed = {name for name in self._undelivered.sums if self._layout.leads(name)}

    def forward(self, call: Callable[[], Loss]) -> Loss:
        """Run a forward pass of a step. Collective: yes, if the ranks divide the model."""
        with self._gathers.watch(), self._named_errors():
            return call()

    def backward(self, call: Callable[[], None]) -> None:
        """Run a backward pass; in the last one, or each, exchange each bucket as soon as it is full."""
        self._count_passes()
        self._is_running = True
        with self._named_errors():
            call()
        self._is_running = False
        if self.leaves is not None and self.schedule.left and not self._sums_each_pass:
            self.leaves.take([(name, self._layout.parameters[name]) for name in self._layout.exchanges])

    def _named_errors(self) -> AbstractContextManager[object]:
        return naming_lost_rank("an exchange of activations") if self.uniform_passes else nullcontext()

    def _on_gradient(self, name: str, parameter: nn.Parameter) -> None:
        self._used.add(name)
        is_last = not self.schedule.left or (self._sums_each_pass and self._layout.exchanges[name] is not None)
        if self._is_running and is_last and self._overlaps:
            self.add_gradient(name, parameter)

    def add_gradient(self, name: str, parameter: nn.Parameter) -> None:
        """Give the gradient of all passes to this rank's part of a parameter, and begin its exchange.

        On one copy, add what an earlier exchange with a compression has not delivered.
        """
        self._handed.add(name)
        held = self._layout.held[name]
        rows = held.parameter
        assert rows is not None
        if rows is not parameter and parameter.grad is not None:
            gradient: Tensor = parameter.grad
            if on_stages(parameter) is None:
                # torch may leave the gradient of a divided matrix whole, or a part of a sum.
                placements = cast("DTensor", parameter).placements
                gradient = cast("DTensor", gradient).redistribute(placements=placements)
            rows.grad, parameter.grad = local(gradient), None
        if name in self._owed:
            self._owed.discard(name)
            residual = held.cut(self._undelivered.sums[name]).to(rows.device, rows.dtype) / self._weight
            rows.grad = residual if rows.grad is None else rows.grad.add_(residual)
        if (exchange := self._layout.exchanges[name]) is not None:
            exchange.add_gradient(name)

    def _count_passes(self) -> None:
        """Begin to exchange the numbers of passes, once a step, if ranks may have different ones. Collective: yes."""
        if self._sums_each_pass and not self.uniform_passes and self._most is None:
            count = torch.tensor([self.schedule.left + self.schedule.begun])
            self._most = self._comm.allgather(count, name=f"{self._name}/passes")

    def end_pass(self) -> None:
        """End a pass; with ZeRO-2 as `sum_pass`."""
        if self._sums_each_pass:
            self.sum_pass()

    def sum_pass(self) -> None:
        """Wait for the sums of a pass, to which those of the next one are added. Collective: yes."""
        for name, exchange in self._layout.exchanges.items() if not self._overlaps else ():
            if exchange is not None and self._layout.parameters[name].grad is not None:
                self.add_gradient(name, self._layout.parameters[name])
        for each in self._divided:
            each.end_pass()

    def finish(self) -> list[Tensor]:  # noqa: D102
        self.complete()  # of parameters that no forward pass has used
        self._count_passes()
        if self._most is not None:  # ranks with fewer micro-batches take part with zeros
            for _ in range(self.schedule.begun, int(self._most.wait().max())):
                if self.schedule.begun:
                    self.sum_pass()
                self.schedule.count()
        for name, exchange in self._layout.exchanges.items():  # those that the last pass has not used
            parameter = self._layout.parameters[name]
            waits = name not in self._handed or (self._sums_each_pass and exchange is not None and not self._overlaps)
            if (waits and parameter.grad is not None) or name in self._owed:
                self.add_gradient(name, parameter)
        gradients = [gradient for exchange in self._layout.every for gradient in exchange.finish()]
        for name, exchange in self._layout.exchanges.items():
            if exchange is None and (rows := self._layout.held[name].parameter) is not None:
                rows.grad = torch.zeros_like(rows) if rows.grad is None else rows.grad
                gradients.append(rows.grad)
        return gradients

    def unused(self) -> list[bool]:
        """Return for each trained parameter whether this rank has none of it, or has not used it."""
        unused = {name for name in self._layout.exchanges if self._layout.parameters[name].grad is None} - self._used
        return [name in unused or name not in self._layout.exchanges for name in self._layout.trained_names()]

    def _may_owe(self) -> bool:
        return self.uniform_passes or self.keeps_error or bool(self._undelivered.sums)

    def _trained_names(self) -> list[str]:
        return self._layout.trained_names()

    def norm(self, gradients: list[Tensor]) -> Tensor:  # noqa: D102
        if self.leaves is not None:
            return norm_by_row(self._layout.owned, self._layout.parameters, self._comm, self._name)
        return self._layout.norm(gradients)

    def spread(self) -> None:  # noqa: D102
        if self._divided:
            self._optimizer.zero_grad()  # what is sent takes their memory
            self.send()

    def send(self) -> None:
        """Start to send what owners have updated. Collective: yes."""
        if self._coded is not None:
            self._coded.begin_spread(getattr(self._optimizer, "found_inf", None))  # set if the device decides
        self.clear()
        # Now: parameters may be frozen before the last gather starts.
        self._gathers.start([bucket for each in self._divided for bucket in each.to_gather()])
        if not self._overlaps:
            self._gathers.finish()

    def clear(self) -> None:
        """Free the sums."""
        for each in self._divided:
            each.clear()

    def complete(self) -> None:
        """Wait for the parameters that other ranks have updated."""
        self._gathers.finish()

    def take_changes(self) -> None:
        """Use what a program has written to the model's parameters since the last step."""
        if self._coded is not None:  # else the optimizer's are in the same memory
            self._coded.take_changes()

    def before_load(self, values: Mapping[str, Any]) -> None:  # noqa: D102
        for each in self._divided:
            for bucket in each.buckets:
                bucket.read_model()

    @property
    def keeps_error(self) -> bool:
        """Whether the compression uses error feedback."""
        return self._coded is not None and self._coded.keeps_error

    def parameters_by_collective(self) -> dict[str, list[str]]:  # noqa: D102
        return {name: names for each in self._layout.every for name, names in each.parameter_names().items()}

    def copies(self) -> Mapping[str, int]:  # noqa: D102
        return self._layout.copies()

    def buffers(self) -> list[Tensor]:
        """Return the memory of the buckets."""
        return [buffer for each in self._layout.every for buffer in each.buffers()]

    def close(self) -> None:  # noqa: D102
        self._remove_hooks()
        self._gathers.close()
        self._layout.close()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
