"""An optimizer of the user's whose gradients are exchanged: what `hvd.DistributedOptimizer` is, on our reducer."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from hvdtrain.errors import CallOrderError, TaskError
from hvdtrain.exchange.reducer import Reducer

_ATTRIBUTE = "_hvdtrain_exchange"
_numbers: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)


def fresh_name(ranks: int) -> str:
    """What the collectives of another optimizer among `ranks`, the number of a process set, are called.

    Equal on all ranks of the set that make theirs in the same order, whatever other sets they are in.
    """
    number = next(_numbers[ranks])
    return "gradients" + (f".set{ranks}" if ranks else "") + (f".{number}" if number else "")


class Exchange:
    """Which step the gradients belong to: from the first one that comes until the optimizer has followed the sums.

    Args:
        reducer: counts backward passes.
        terms: (comm, weight, factor) for `Reducer.restart`.
        session: another number when the ranks are others.
    """

    def __init__(
        self, reducer: Reducer, terms: Callable[[], tuple[Any, float, float]], session: Callable[[], int]
    ) -> None:
        self.reducer = reducer
        self._terms = terms
        self._session = session
        self._last_session = session()
        self._skip = False
        self._synchronized = False
        self._warned = False
        reducer.before = self._look
        reducer.forget()  # what parameters there are is looked at with the first gradient

    def _look(self) -> None:
        self._synchronized = False
        if self._session() != self._last_session:
            self.restart()
        self.reducer.refresh()

    def synchronize(self) -> None:
        """Sum the gradients as they are; what was summed before is summed again. Collective: yes."""
        if self.reducer.over:
            self._end()
        self.sum_up()
        self._synchronized = True

    def sum_up(self) -> None:
        """See that gradients are summed; the second time in a step it does nothing. Collective: yes."""
        if not self.reducer.over:
            self.reducer.finish()

    def clear(self) -> None:
        """Gradients are about to be cleared: what has come of this step is not followed.

        Errors:
            CallOrderError: some of them are on their way.
        """
        if self.reducer.over:
            self.reducer.commit(applied=False)
        elif self.reducer.begun:
            raise CallOrderError(
                "optimizer.zero_grad() was called after backward, with gradients on their way",
                next_step="call optimizer.step() or optimizer.synchronize() before it, on every rank",
            )
        self.forget()

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """Within, a step takes the gradients as they are."""
        self._skip = True
        try:
            yield
        finally:
            self._skip = False

    def step(self, follow: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
        """Sum the gradients, let the optimizer `follow` them, begin the next step.

        With a closure, the loss that it returns is averaged (or summed) as gradients are.
        """
        if closure is not None:
            return self._step_with(follow, closure)
        if self._synchronized and not self._skip:
            warnings.warn(
                "optimizer.step() after optimizer.synchronize() exchanges the gradients a second time, as in Horovod: "
                "call it within optimizer.skip_synchronize()",
                stacklevel=3,
            )
            self.synchronize()
        if not self._skip or self.reducer.begun:
            self.sum_up()
        if self.reducer.over and not self.reducer.finite():
            return self._leave_out()
        result = follow()
        self._end()
        return result

    def _leave_out(self) -> None:
        """Compression cannot carry what is not finite: the optimizer does not follow it, on any rank."""
        if not self._warned:
            self._warned = True
            warnings.warn("a step is left out whose compressed gradients are not finite (said once)", stacklevel=4)
        self.reducer.commit(applied=False)
        self.forget()

    def _step_with(self, follow: Callable[..., Any], closure: Callable[[], Any]) -> Any:
        if self.reducer.begun:
            self.sum_up()

        def summed() -> Any:
            if self.reducer.over:
                self._end()
            with torch.enable_grad():
                loss = closure()
            self.sum_up()
            # What a line search decides by has to be the same on all ranks, like the gradients that it goes with.
            if isinstance(loss, Tensor) and loss.numel() == 1:
                return torch.full_like(loss, self.reducer.total(loss.item()))
            return self.reducer.total(loss) if isinstance(loss, float) else loss

        result = follow(summed)
        self._end()
        return result

    def _end(self) -> None:
        self.reducer.commit(applied=True)
        self.forget()

    def forget(self) -> None:
        """Expect the gradients of a step from its beginning."""
        self.reducer.forget()
        self._synchronized = False

    def restart(self) -> None:
        """Begin anew among the ranks that there are now."""
        self._last_session = self._session()
        self.reducer.restart(*self._terms())


def exchanging(optimizer: Optimizer, exchange: Exchange) -> Optimizer:
    """Give an optimizer the exchange: the same object, its class a subclass of what it was.

    So schedulers, gradient scalers and references that were made before stay right, its state stays, and
    ``isinstance(optimizer, torch.optim.SGD)`` holds.

    Errors:
        TaskError: it has one already.
    """
    if hasattr(optimizer, _ATTRIBUTE):
        raise TaskError("the optimizer was made distributed before", next_step="call DistributedOptimizer once")
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (kind,), _methods(kind))
    # A scheduler that was made before has put its own wrapper of the old class's step there.
    optimizer.__dict__.pop("step", None)
    setattr(optimizer, _ATTRIBUTE, exchange)
    _exchanges[id(optimizer)] = exchange
    _work_with_loss_scales()
    return optimizer


_exchanges: WeakValueDictionary[int, Exchange] = WeakValueDictionary()
"""By the identity of their optimizers, as torch's GradScaler knows these."""


def _work_with_loss_scales() -> None:
    """Sum gradients before a GradScaler unscales them; multiply what compression carries where its scale changes.

    GradScaler has no hook for either: `unscale_`, which its `step` calls too, and `update` are wrapped, once for all
    instances.
    """
    unscale, update = torch.amp.GradScaler.unscale_, torch.amp.GradScaler.update
    if hasattr(update, "_hvdtrain_wraps"):
        return

    @functools.wraps(unscale)
    def unscale_summed(self: torch.amp.GradScaler, optimizer: Optimizer) -> None:
        exchange = _exchanges.get(id(optimizer))
        if exchange is not None and self.is_enabled():
            exchange.sum_up()
        unscale(self, optimizer)

    @functools.wraps(update)
    def update_all(self: torch.amp.GradScaler, new_scale: float | Tensor | None = None) -> None:
        found = [exchange for number in self._per_optimizer_states if (exchange := _exchanges.get(number))]
        found = [exchange for exchange in found if exchange.reducer.keeps_error]
        before = self.get_scale() if found else 1.0  # waits for the device
        update(self, new_scale)
        if found and (after := self.get_scale()) != before:
            for exchange in found:
                exchange.reducer.rescale(after / before)

    update_all._hvdtrain_wraps = True  # type: ignore[attr-defined]
    torch.amp.GradScaler.unscale_ = unscale_summed  # type: ignore[method-assign]
    torch.amp.GradScaler.update = update_all  # type: ignore[method-assign]


def _methods(kind: type[Optimizer]) -> dict[str, Any]:
    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        """Sum the gradients over ranks unless that was done, and follow them. Collective: yes."""
        self._opt_called = True  # schedulers warn where they do not find it

        def follow(*arguments: Any) -> Any:
            return kind.step(self, *arguments)

        return self._hvdtrain_exchange.step(follow, closure)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers need not wrap it again
    step.hooked = True  # type: ignore[attr-defined]  # nor torch, when it loads a state: `kind.step` calls the hooks

    def zero_grad(self: Any, *arguments: Any, **keywords: Any) -> None:
        """Clear the gradients, of which none may be on its way."""
        self._hvdtrain_exchange.clear()
        kind.zero_grad(self, *arguments, **keywords)

    def synchronize(self: Any) -> None:
        """Wait until every gradient is the sum (or mean) over ranks; once more each time. Collective: yes."""
        self._hvdtrain_exchange.synchronize()

    def skip_synchronize(self: Any) -> Any:
        """A context in which `step` takes gradients as they are, after `synchronize` and clipping."""
        return self._hvdtrain_exchange.skipping()

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        """Take over a state, on any of the ranks; an exchange that was under way is forgotten."""
        kind.load_state_dict(self, state_dict)
        self._hvdtrain_exchange.forget()

    def set_backward_passes_per_step(self: Any, passes: int) -> None:
        """Exchange after this many backward passes from the next step on."""
        self.backward_passes_per_step = passes
        self._hvdtrain_exchange.reducer.set_passes(passes)

    def exchange_state_dict(self: Any) -> dict[str, Any]:
        """What compression carries from step to step, the same on all ranks then. Collective: yes."""
        self._hvdtrain_exchange.reducer.synchronize_state()
        tensors, values = self._hvdtrain_exchange.reducer.state_dict()
        return {"tensors": tensors, "values": values}

    def load_exchange_state_dict(self: Any, state: Mapping[str, Any]) -> None:
        """Take over what `exchange_state_dict` gave, on every rank the same."""
        tensors: Mapping[str, Tensor] = state["tensors"]
        self._hvdtrain_exchange.reducer.load_state_dict(tensors, state["values"])

    # Horovod's broadcast_optimizer_state knows an optimizer that must not exchange there by its module.
    methods = (
        step,
        synchronize,
        skip_synchronize,
        zero_grad,
        load_state_dict,
        set_backward_passes_per_step,
        exchange_state_dict,
        load_exchange_state_dict,
    )
    return {"__module__": "horovod.torch.optimizer", **{method.__name__: method for method in methods}}
