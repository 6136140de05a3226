"""The exchange between groups of ranks that each have the whole model, divided among them by FSDP2.

torch's own hybrid sharding, by a mesh of two dimensions, is not used: it cannot compress between groups, and takes no
custom collectives inside them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hvdtrain.comm.base import Comm
from hvdtrain.engine.blocks import before_forward
from hvdtrain.engine.parts import EngineParts
from hvdtrain.engine.schedule import Schedule
from hvdtrain.exchange.active_buckets import BetweenCopies
from hvdtrain.exchange.buckets import prepare_exchange, resolve_compression
from hvdtrain.spans import Spans
from hvdtrain.state.exchange_state import Owned
from hvdtrain.state.pieces import Place

if TYPE_CHECKING:
    from hvdtrain.engine.fsdp_collectives import FsdpCollectives


class BetweenGroups(BetweenCopies):
    """Rank i of every group has the same part of the model: they exchange the sums of their groups.

    In the last backward pass of a step, sums are exchanged with the other groups in buckets, as soon as they have
    arrived; those of a module that ran several times in the pass, after it.

    Args:
        parts: its compression is that of this exchange.
        replicas: the ranks with the same part.
        modules: that FSDP divides, by name: the model first, or what is outside of blocks.
        names: of the parameters of each.
        parameters: of the model, by name; `owned` are this rank's rows of them.
        collectives: in the group; None for those of torch.
        schedule: counts the passes.
        take: adds a sum of this pass to `sums`, those of all passes by parameter.
        overlaps: whether the exchange may begin while backward runs.
    """

    def __init__(
        self,
        parts: EngineParts,
        replicas: Comm,
        modules: Mapping[str, nn.Module],
        names: Mapping[str, list[str]],
        parameters: Mapping[str, nn.Parameter],
        owned: Mapping[str, Owned],
        collectives: FsdpCollectives | None,
        schedule: Schedule,
        take: Callable[[str], None],
        sums: dict[str, Tensor],
        *,
        overlaps: bool,
    ) -> None:
        self._parameters, self._owned, self._schedule, self._take, self._sums = parameters, owned, schedule, take, sums
        compression = resolve_compression(parts.plan.compression, parts.device, parts.variables)
        limit = prepare_exchange(compression, replicas, parts.variables, parts.plan.bucket_mib)
        outside, *blocks = names.values()  # the gradients outside of blocks are the last ones
        order = [name for of_block in [*reversed(blocks), outside] for name in reversed(of_block) if name in owned]
        rows = [(name, rows) for name in order if (rows := owned[name].parameter) is not None]
        trained = [(name, parameter) for name, parameter in rows if parameter.requires_grad]
        super().__init__(trained, replicas, compression, limit, parts.spans or Spans(), "replicas")
        self._is_backward = False
        self._runs: Counter[str] = Counter()  # forward passes of each module in this pass
        self._undo: list[Callable[[], object]] = []
        for name, module in modules.items() if overlaps else ():
            self._undo.append(before_forward(module, partial(self._count_run, name)))
        if overlaps and collectives is not None:
            collectives.on_sum = lambda module: self._on_sum(module, names[module])
        elif overlaps:
            self._undo += [self._call_on_sum(module, name) for module in names for name in names[module]]

    def _call_on_sum(self, module: str, name: str) -> Callable[[], object]:
        """Let torch call `_on_sum` for a parameter; return what ends this."""
        if (parameter := self._parameters.get(name)) is None or not parameter.requires_grad:
            return lambda: None
        hook = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda _: self._on_sum(module, [name])
        )
        return hook.remove  # type: ignore[no-any-return]

    def forward(self) -> None:
        """Begin a forward pass."""
        self._runs.clear()

    def backward(self, call: Callable[[], None]) -> None:
        """Run a backward pass, which computes checkpointed activations again."""
        self._is_backward = True
        call()
        self._is_backward = False

    def _count_run(self, module: str) -> None:
        if not self._is_backward:
            self._runs[module] += 1

    def _on_sum(self, module: str, names: Sequence[str]) -> None:
        """Exchange sums that have arrived, if they are the last ones of the step: a module has one for each run."""
        if self._schedule.left or self._runs[module] != 1:
            return
        for name in names:
            if name in self._parameters:
                self._take(name)
                self._hand_over(name)

    def _hand_over(self, name: str) -> None:
        """Let the exchange have the sum of all passes."""
        rows = self._owned[name].parameter
        if name in self._sums and rows is not None:
            rows.grad = self._sums.pop(name)
            self.add_gradient(name)

    def finish(self) -> list[Tensor]:
        """Wait for the sums of all groups, which become the gradients of the optimizer. Collective: yes."""
        for name in list(self._sums):
            self._hand_over(name)
        return super().finish()

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the residuals of this rank's rows."""
        tensors, values = super().state_dict()
        return tensors, {**values, "plan": None}  # it follows from the model

    def state_place(self, key: str) -> Place | None:  # noqa: D102
        return self._owned[key.rpartition("/")[0]].place

    def residual_ranks(self, key: str) -> Sequence[int]:
        """Return the ranks with the same rows, one of each group."""
        own = self._owned.get(key.rpartition("/")[0])
        return () if own is None or own.place is None else own.place.ranks

    def load_state_dict(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Load residuals, of whole parameters or of this rank's rows."""
        rows = {}
        for key, tensor in tensors.items():
            own = self._owned.get(key.rpartition("/")[0])
            if own is not None and own.parameter is not None:
                rows[key] = own.cut(tensor).clone()
        super().load_state_dict(rows, values)

    def close(self) -> None:
        """Remove the hooks."""
        for undo in self._undo:
            undo()
