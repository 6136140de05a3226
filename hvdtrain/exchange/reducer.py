"""Sum gradients over ranks in flat buckets while backward runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from torch import Tensor, nn

from hvdtrain.comm.base import Comm
from hvdtrain.compression.base import Figures
from hvdtrain.compression.table import ONE_HOST_MIB, Compression, parse
from hvdtrain.errors import JoinedError
from hvdtrain.exchange.active_buckets import ActiveBuckets, DetachedState
from hvdtrain.exchange.agreement import agree_on_plan
from hvdtrain.exchange.backward_passes import BackwardPasses, FinishedGradients, accumulation, uncompiled
from hvdtrain.exchange.bucket_exchange import BucketExchange
from hvdtrain.exchange.buckets import Named, assign_buckets, sizes_of
from hvdtrain.exchange.in_order import Leaves
from hvdtrain.exchange.own_loop import Sums
from hvdtrain.exchange.residuals import leave_out, residual_key
from hvdtrain.plan.buckets import BucketPlan
from hvdtrain.spans import Spans

BUCKET_BYTES = ONE_HOST_MIB << 20
"""Default size limit of a bucket."""


class Reducer(ActiveBuckets, Sums):
    """Sums gradients over ranks.

    Autograd makes a gradient in its own memory. It is then copied once into its bucket, while it is in the cache.
    Accumulating into views of the bucket from the start would cost a zeroing and an addition per step. After the
    exchange the sum is copied back, or the gradient becomes a view of the bucket, which saves a copy and memory.

    The first step learns in which order backward finishes gradients, which are sparse, and which have few non-zero
    rows. It exchanges its buckets after backward. So does the first step after a change of the parameters.

    Args:
        parameters: returns the parameters to exchange, equal on all ranks and in the same order; called before each
            step.
        compression: of dense gradients; default: none.
        bucket_bytes: size limit of a bucket.
        weight: applied to each gradient before the exchange.
        factor: applied to each sum after the exchange.
        passes: backward passes per step, the last of them with the exchange; 0 if `collect` announces the last one.
        groups: names of parameters that are exchanged together whatever their size.
        sparse_as_dense: exchange sparse gradients like dense ones, and leave them dense.
        as_views: let gradients become views of the buckets; parameters then have no gradients between backward and the
            end of the exchange. Otherwise a gradient stays the same tensor, and changing it meanwhile is an error.
        name: prefix of the collectives' names.
        spans: records each exchange, from its start until it was waited for.
        leaves: gradients of the passes before the last one, for sums in one order.

    Attributes:
        before: called with the first gradient of a step, or before its exchange if there is none.
        over: whether the sums of this step are complete. If passes are counted, the next gradient then starts another
            step, and this one was not applied.
    """

    def __init__(
        self,
        parameters: Callable[[], Named],
        comm: Comm,
        compression: Compression | None = None,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        weight: float = 1.0,
        factor: float = 1.0,
        passes: int = 0,
        groups: Sequence[Sequence[str]] = (),
        sparse_as_dense: bool = False,
        as_views: bool = True,
        name: str = "gradients",
        spans: Spans | None = None,
        leaves: Leaves | None = None,
    ) -> None:
        make = partial(BucketExchange, name=name, spans=spans or Spans(), as_views=as_views, leaves=leaves)
        super().__init__(comm, compression or parse("none"), make, weight, factor)
        self._parameters = parameters
        self._bucket_bytes = bucket_bytes
        self._make_plan = partial(assign_buckets, limit_bytes=bucket_bytes, groups=groups)
        self._passes = BackwardPasses(passes)
        self._sparse_as_dense = sparse_as_dense
        self._name = name
        self._hooks: list[Any] = []
        self._finished = FinishedGradients(detect_changes=not as_views)
        self.before: Callable[[], None] = lambda: None
        self.over = False
        self._fresh = True
        self._provisional = False
        self._set_parameters(list(parameters()))

    def begin(self) -> None:  # noqa: D102
        self.refresh()
        self.forget()

    def refresh(self) -> None:  # noqa: D102
        current = list(self._parameters())
        if len(current) != len(self.named) or any(a[1] is not b[1] for a, b in zip(current, self.named, strict=True)):
            self.synchronize_state()
            self._set_parameters(current)

    def forget(self) -> None:
        """Drop the gradients of the current step and start another one."""
        if self._provisional:
            self._provisional = False
            self.drop()
        if self.exchange is not None:
            if revised := self.exchange.revised_plan():
                self.adopt(revised)
            self.exchange.begin()
        self._figures = None
        self._finished.clear()
        self._passes.begin()
        self.over = False
        self._fresh = True

    def switch(self, compression: Compression) -> None:
        """Use another compression from the next step on. Clears gradients. Collective: yes."""
        for _, parameter in self.named:
            parameter.grad = None  # it may be a view of a bucket
        self.synchronize_state()
        self._compression = compression
        if self.exchange is not None:
            self.adopt(self.exchange.plan)

    def collect(self) -> None:
        """Exchange the gradients of the next backward pass, which is the last one of the step."""
        self._passes.last = True

    def finish(self) -> list[Tensor]:
        """Exchange the remaining gradients, wait for all, and return the sums, views of the buckets. Collective: yes.

        For a sparse gradient it returns the values.

        Errors:
            LaunchError: the ranks have different parameters.
            CallOrderError: a gradient was changed after its backward pass.
        """
        self._begin_once()
        self._passes.last = False
        if self._alone and not self.keeps_error and not any(self.detached.has_residual(n) for n, _ in self.named):
            self.over = True
            return []
        self._finished.check_unchanged(self.named)
        exchange = self.exchange or self._learn()
        sums = exchange.finish()
        self._figures = Figures(exchange.compressors)  # now: the host waits for nothing that the device gets later
        self.over = True
        return sums

    def unused(self) -> list[bool]:
        """Return for each parameter whether no pass of this step has given it a gradient; before `finish`."""
        return [parameter.grad is None and name not in self._finished for name, parameter in self.named]

    def leave_out(self, numbers: Sequence[int]) -> None:
        """Remove the gradients of these parameters, which no rank has used, unless a residual is all of their sum."""
        for number in numbers:
            name, parameter = self.named[number]
            leave_out(parameter, may_be_residual=self.keeps_error or residual_key(name) in self._delivered)

    @property
    def _alone(self) -> bool:
        """Whether it serves a user's loop on one rank, which may change gradients until the step."""
        return self.comm.size == 1 and self._passes.count > 0

    @property
    def begun(self) -> bool:
        """Whether the last pass of this step has finished a gradient."""
        return bool(self._finished)

    @property
    def keeps_error(self) -> bool:
        """Whether the compression uses error feedback."""
        return self._compression.kind.feedback

    def load_state_dict(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Load a state. Its plan is ignored if it has other parameters or another size of buckets."""
        self.exchange = self._figures = None
        self.detached = DetachedState(tensors, int(values["ranks"]))
        if (saved := values["plan"]) is not None:
            loaded = msgspec.convert(saved, BucketPlan)
            if loaded.fits(sizes_of(self.named)) and loaded.limit_bytes == self._bucket_bytes:
                with_residual = [name for name in loaded.rows if self.detached.has_residual(name)]
                self.adopt(loaded.without_rows(with_residual))

    def restart(self, comm: Comm, weight: float, factor: float) -> None:
        """Drop the current step and continue with other ranks; this rank keeps its residuals."""
        self.comm, self._weight, self._factor = comm, weight, factor
        self.drop_all_but_residuals(comm.size)
        self.forget()

    def close(self) -> None:  # noqa: D102
        for hook, _ in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _set_parameters(self, named: list[tuple[str, nn.Parameter]]) -> None:
        """Exchange these parameters from now on; the next step learns their order."""
        self.drop()
        self.close()
        self.named = named
        for name, parameter in named:
            # Its hooks come after those of the parameter, which may change the gradient. The parameter does not own it.
            node = accumulation(parameter)
            hook = uncompiled(partial(self._on_gradient, name, parameter))
            self._hooks.append((node.register_hook(hook), node))

    def _on_gradient(self, name: str, parameter: nn.Parameter, *_: Any) -> None:
        if self.over and self._passes.count:
            self.commit(applied=False)
            self.forget()
        self._begin_once()
        if not self._passes.record_gradient(name) or self._alone:
            return
        self._finished.add(name, parameter.grad)
        if (exchange := self.exchange) is not None:
            exchange.add_gradient(name)

    def _learn(self) -> BucketExchange:
        """Agree with the other ranks on a plan. Collective: yes.

        A rank that has joined cannot agree: then this step uses a plan that follows from the parameters alone.
        """
        try:
            agreed = agree_on_plan(
                self.comm,
                self.named,
                self._make_plan,
                list(self._finished),
                self.detached.has_residual,
                self._name,
                sparse_as_dense=self._sparse_as_dense,
            )
        except JoinedError:
            agreed, self._provisional = self._make_plan(self.named), True
        return self.adopt(agreed)
