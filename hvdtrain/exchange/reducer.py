"""Gradients summed over ranks in flat buckets while backward runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.comm.base import Comm
from hvdtrain.compression.table import ONE_HOST_MIB, Compression
from hvdtrain.errors import JoinedError
from hvdtrain.exchange.active_buckets import ActiveBuckets
from hvdtrain.exchange.agreement import agree
from hvdtrain.exchange.arrivals import Arrivals
from hvdtrain.exchange.bucket_exchange import BucketExchange
from hvdtrain.exchange.buckets import Layout, Named, Plan, plan
from hvdtrain.exchange.passes import Passes
from hvdtrain.spans import Spans

BUCKET_BYTES = ONE_HOST_MIB << 20
"""Of the largest bucket, where nobody says otherwise."""


class Reducer:
    """Sums gradients over ranks.

    A gradient is first made where autograd makes it, then copied once, hot, into its bucket. Accumulating into views
    from the start would cost a zeroing and an addition a step instead. After the exchange the sum is copied back, or
    the gradient becomes a view of the bucket, which saves that copy and the memory of the gradient.

    The first step learns in which order backward finishes gradients, which of them are sparse, and of which few rows
    are not zero; its buckets are exchanged after backward. So does the first step after the set of parameters has
    changed.

    Args:
        parameters: gives those to exchange, equal on all ranks, in the same order; asked before each step.
        comm: the ranks.
        compression: how buckets travel; none where it is left out.
        bucket_bytes: largest bucket.
        weight: what each gradient is multiplied by before the exchange.
        factor: what each sum is multiplied by after it.
        passes: backward passes of a step, of which the last one exchanges; 0 where `collect` announces the last.
        groups: names of parameters that are exchanged together whatever their size.
        sparse_as_dense: exchange sparse gradients like others; they are dense afterwards.
        as_views: let gradients become views of the buckets; between backward and the end of the exchange parameters
            have none. Otherwise a gradient stays the tensor that it is, and who changes it meanwhile gets an error.
        name: what the collectives' names begin with.
        spans: told of each exchange, from its start until it was waited for.

    Attributes:
        before: called with the first gradient of a step, or before its exchange where none has come.
        over: whether the sums of this step are there. Where passes are counted, a gradient that comes then begins
            another step: the last one was not applied.
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
    ) -> None:
        self._parameters = parameters
        self._comm = comm
        self._compression = compression or Compression.none()
        self._bucket_bytes = bucket_bytes
        self._draft = partial(plan, limit_bytes=bucket_bytes, groups=groups)
        self._weight = weight
        self._factor = factor
        self._passes = Passes(passes)
        self._sparse_as_dense = sparse_as_dense
        self._as_views = as_views
        self._name = name
        self._spans = spans or Spans()
        self._known: list[tuple[str, nn.Parameter]] = []
        self._hooks: list[Any] = []
        self._standing = ActiveBuckets(self._flight, comm.size)
        self._arrivals = Arrivals(stay=not as_views)
        self.before: Callable[[], None] = lambda: None
        self.over = False
        self._fresh = True
        self._unagreed = False
        self._renew(list(parameters()))

    def begin(self) -> None:
        """Start a step. Collective: yes, where parameters were added, frozen or freed since the last one."""
        self.refresh()
        self.forget()

    def refresh(self) -> None:
        """Between two steps: look at which parameters there are. Collective: yes, where they are others than before."""
        current = list(self._parameters())
        if len(current) != len(self._known) or any(a[1] is not b[1] for a, b in zip(current, self._known, strict=True)):
            self.synchronize_state()
            self._renew(current)

    def forget(self) -> None:
        """Expect the gradients of a step from its beginning, whatever has come of it."""
        if self._unagreed:
            self._unagreed = False
            self._standing.drop()
        if (flight := self._standing.flight) is not None:
            if changed := flight.crowded():
                flight = self._standing.adopt(changed, dict(self._known))
            flight.begin()
        self._arrivals.clear()
        self._passes.begin()
        self.over = False
        self._fresh = True

    def _look(self) -> None:
        """Before anything is done for a step."""
        if self._fresh:
            self._fresh = False
            self.before()

    def switch(self, compression: Compression) -> None:
        """Let buckets travel another way from the next step on. Collective: yes."""
        self.synchronize_state()
        self._compression = compression
        if (flight := self._standing.flight) is not None:
            self._standing.adopt(flight.plan, dict(self._known))

    def set_passes(self, passes: int) -> None:
        """Expect this many backward passes a step from now on."""
        self._passes = Passes(passes)

    def collect(self) -> None:
        """The next backward pass is the last of the step: exchange what it finishes."""
        self._passes.announce()

    def finish(self) -> list[Tensor]:
        """Exchange what is left, wait for all; the summed gradients, views of the buckets. Collective: yes.

        Of a sparse gradient it is the values.

        Errors:
            LaunchError: the parameters of one rank are not those of another.
            CallOrderError: a gradient was changed after its backward pass.
        """
        self._look()
        self._passes.end()
        if self._alone and not self.keeps_error and not any(self._standing.carried.owes(n) for n, _ in self._known):
            self.over = True
            return []
        self._arrivals.refuse_changed(self._known)
        flight = self._standing.flight or self._learn()
        sums = flight.finish()
        self.over = True
        return sums

    @property
    def _alone(self) -> bool:
        """Whether it is for a user's loop on one rank, which may do what it likes with gradients until the step."""
        return self._comm.size == 1 and self._passes.count > 0

    @property
    def begun(self) -> bool:
        """Whether a gradient of the last pass of this step has come."""
        return bool(self._arrivals)

    def finite(self) -> bool:
        """Whether compressors that keep or lose something found what came finite; equal on all ranks."""
        return self._standing.finite()

    def commit(self, *, applied: bool) -> None:
        """Keep what the exchange changed in the compressors' state; if the step was not applied, forget it."""
        self._standing.commit(applied=applied)

    def rescale(self, factor: float) -> None:
        """Gradients are multiplied by `factor` from now on, and so is what compressors carry to the next step."""
        self._standing.rescale(factor)

    @property
    def keeps_error(self) -> bool:
        """Whether compression carries to the next step what it has not delivered."""
        return self._compression.kind.feedback

    def total(self, value: float) -> float:
        """A number of this rank, weighted and summed as gradients are. Collective: yes."""
        number = torch.tensor([value * self._weight], dtype=torch.float64)
        return float(self._comm.allreduce(number, name=f"{self._name}/total").wait()) * self._factor

    def synchronize_state(self) -> None:
        """Make the state the same on all ranks, so that it can be saved by one. Collective: yes."""
        self._standing.synchronize_state()

    def synchronized_state(self) -> dict[str, Tensor]:
        """The tensors as `synchronize_state` would make them, which stay as they are. Collective: yes.

        To be read before the next step.
        """
        return self._standing.synchronized_state()

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and plain values; after `synchronize_state` equal on all ranks. Tensors are not copied."""
        return self._standing.state_dict()

    def load_state_dict(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Take over a state; a plan of other parameters or by another size of buckets is made anew by the next step."""
        self._standing.load_state_dict(tensors, values, self._known, self._bucket_bytes)

    def restart(self, comm: Comm, weight: float, factor: float) -> None:
        """Forget what is under way and go on among other ranks; what this rank still owes it owes here."""
        self._comm, self._weight, self._factor = comm, weight, factor
        self._standing.restart(comm.size)
        self.forget()

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def carried(self) -> dict[str, list[str]]:
        """Names of the parameters whose gradients each bucket carries, by what its collectives' names begin with."""
        flight = self._standing.flight
        return {} if flight is None else flight.carried()

    def layouts(self) -> list[Layout]:
        """What lies where; nothing while the order is being learned."""
        flight = self._standing.flight
        return [] if flight is None else flight.layouts

    def buffers(self) -> list[Tensor]:
        """The memory that buckets take."""
        flight = self._standing.flight
        return [] if flight is None else flight.buffers()

    def _renew(self, named: list[tuple[str, nn.Parameter]]) -> None:
        """Exchange these parameters from now on, in an order to be learned."""
        self._standing.drop()
        self.close()
        self._known = named
        for name, parameter in named:
            hook = parameter.register_post_accumulate_grad_hook(self._hook(name))  # type: ignore[no-untyped-call]
            self._hooks.append(hook)

    def _hook(self, name: str):  # type: ignore[no-untyped-def]
        def on_gradient(parameter: nn.Parameter) -> None:
            if self.over and self._passes.count:
                self.commit(applied=False)
                self.forget()
            self._look()
            if not self._passes.reached(name) or self._alone:
                return
            self._arrivals.note(name, parameter.grad)
            if (flight := self._standing.flight) is not None:
                flight.arrived(name)

        return on_gradient

    def _learn(self) -> BucketExchange:
        """Settle with the other ranks what is exchanged together. Collective: yes.

        Where one of them has joined, and answers no question, it is what needs no answer: for this step alone.
        """
        try:
            agreed = agree(
                self._comm,
                self._known,
                self._draft,
                self._arrivals.names,
                self._standing.carried.owes,
                self._name,
                sparse_as_dense=self._sparse_as_dense,
            )
        except JoinedError:
            agreed, self._unagreed = self._draft(self._known), True
        return self._standing.adopt(agreed, dict(self._known))

    def _flight(self, agreed: Plan) -> BucketExchange:
        return BucketExchange(
            agreed,
            dict(self._known),
            self._comm,
            self._compression,
            self._weight,
            self._factor,
            self._name,
            self._spans,
            as_views=self._as_views,
        )
