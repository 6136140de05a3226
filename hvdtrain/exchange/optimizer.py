"""Give a user's optimizer the exchange of gradients, as `hvd.DistributedOptimizer` does, with our reducer."""

from __future__ import annotations

import itertools
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hvdtrain.errors import CallOrderError, TaskError
from hvdtrain.exchange.grad_scaler import support_grad_scaler
from hvdtrain.exchange.reducer import Reducer

_numbers: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)


def fresh_name(ranks: int) -> str:
    """Return the prefix of the collectives' names of a new optimizer in process set number `ranks`.

    It is equal on all ranks of the set if they make its optimizers in the same order.
    """
    number = next(_numbers[ranks])
    return "gradients" + (f".set{ranks}" if ranks else "") + (f".{number}" if number else "")


class Exchange:
    """The exchange of one optimizer: a step lasts from its first gradient until the optimizer has used the sums.

    Args:
        reducer: counts backward passes.
        terms: returns (comm, weight, factor) for `Reducer.restart`.
        session: returns another number after the ranks have changed.
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
        reducer.before = self._begin_step
        reducer.forget()  # the first gradient makes it read the parameters

    def _begin_step(self) -> None:
        self._synchronized = False
        if self._session() != self._last_session:
            self.restart()
        self.reducer.refresh()

    def synchronize(self) -> None:
        """Sum the current gradients, even if they were summed before. Collective: yes."""
        if self.reducer.over:
            self._end()
        self.sum_up()
        self._synchronized = True

    def sum_up(self) -> None:
        """Sum the gradients, unless this step has done so before. Collective: yes."""
        if not self.reducer.over:
            self.reducer.finish()

    def clear(self) -> None:
        """Drop the current step, because its gradients will be cleared.

        Errors:
            CallOrderError: some gradients are being exchanged.
        """
        if self.reducer.over:
            self.reducer.commit(applied=False)
        elif self.reducer.begun:
            raise CallOrderError(
                "optimizer.zero_grad() was called after backward, while gradients were being exchanged",
                next_step="call optimizer.step() or optimizer.synchronize() first, on every rank",
            )
        self.forget()

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """Return a context in which a step uses the gradients without an exchange."""
        self._skip = True
        try:
            yield
        finally:
            self._skip = False

    def step(self, update: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
        """Sum the gradients, let the optimizer `update` the parameters, begin the next step.

        The loss that a closure returns is averaged (or summed) as gradients are.
        """
        if closure is not None:
            return self._step_with(update, closure)
        if self._synchronized and not self._skip:
            warnings.warn(
                "optimizer.step() after optimizer.synchronize() exchanges the gradients a second time, as in Horovod; "
                "call it within optimizer.skip_synchronize()",
                stacklevel=3,
            )
            self.synchronize()
        if not self._skip or self.reducer.begun:
            self.sum_up()
        if self.reducer.over and not self.reducer.finite():
            return self._skip_step()
        result = update()
        self._end()
        return result

    def _skip_step(self) -> None:
        """Skip the step on all ranks, because its compressed gradients are not finite."""
        if not self._warned:
            self._warned = True
            warnings.warn("skipping a step: its compressed gradients are not finite (shown once)", stacklevel=4)
        self.reducer.commit(applied=False)
        self.forget()

    def _step_with(self, update: Callable[..., Any], closure: Callable[[], Any]) -> Any:
        if self.reducer.begun:
            self.sum_up()

        def summed() -> Any:
            if self.reducer.over:
                self._end()
            with torch.enable_grad():
                loss = closure()
            self.sum_up()
            # A line search must decide by the same loss on all ranks.
            if isinstance(loss, Tensor) and loss.numel() == 1:
                return torch.full_like(loss, self.reducer.total(loss.item()))
            return self.reducer.total(loss) if isinstance(loss, float) else loss

        result = update(summed)
        self._end()
        return result

    def _end(self) -> None:
        self.reducer.commit(applied=True)
        self.forget()

    def forget(self) -> None:
        """Drop the current step and start another one."""
        self.reducer.forget()
        self._synchronized = False

    def restart(self) -> None:
        """Start another step with the current ranks."""
        self._last_session = self._session()
        self.reducer.restart(*self._terms())


def exchanging(optimizer: Optimizer, exchange: Exchange) -> Optimizer:
    """Give an optimizer the exchange. It stays the same object; its class becomes a subclass of its former class.

    So existing schedulers, gradient scalers and references stay valid, its state stays, and
    ``isinstance(optimizer, torch.optim.SGD)`` holds.

    Errors:
        TaskError: it has an exchange already.
    """
    if hasattr(optimizer, "_hvdtrain_exchange"):
        raise TaskError("the optimizer is distributed already", next_step="call DistributedOptimizer once")
    kind = type(optimizer)
    optimizer.__class__ = _distributed(kind)
    # An existing scheduler has set an attribute that wraps the former class's step.
    optimizer.__dict__.pop("step", None)
    optimizer._hvdtrain_exchange = exchange  # type: ignore[attr-defined]
    support_grad_scaler(optimizer, exchange)
    return optimizer


def _distributed(kind: type[Optimizer]) -> type[Optimizer]:
    class Distributed(kind):  # type: ignore[misc, valid-type]
        # Horovod's broadcast_optimizer_state recognizes distributed optimizers by this module name.
        __module__ = "horovod.torch.optimizer"
        __qualname__ = kind.__name__

        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            """Sum the gradients over ranks, unless that was done, and update the parameters. Collective: yes."""
            self._opt_called = True  # schedulers warn if it is missing
            return self._hvdtrain_exchange.step(partial(kind.step, self), closure)

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # so schedulers do not wrap it again
        step.hooked = True  # type: ignore[attr-defined]  # nor does torch when it loads a state: `kind.step` calls the hooks

        def zero_grad(self, *arguments: Any, **keywords: Any) -> None:
            """Clear the gradients; none may be in an exchange."""
            self._hvdtrain_exchange.clear()
            kind.zero_grad(self, *arguments, **keywords)

        def synchronize(self) -> None:
            """Make every gradient the sum (or mean) over ranks; each call sums again. Collective: yes."""
            self._hvdtrain_exchange.synchronize()

        def skip_synchronize(self) -> Any:
            """Return a context in which `step` uses the gradients without an exchange: `synchronize`, clip, `step`."""
            return self._hvdtrain_exchange.skipping()

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            """Load a state, on any of the ranks, and drop the current step."""
            kind.load_state_dict(self, state_dict)
            self._hvdtrain_exchange.forget()

        def set_backward_passes_per_step(self, passes: int) -> None:
            """Exchange gradients after this many backward passes, from the next step on."""
            self.backward_passes_per_step = passes
            self._hvdtrain_exchange.reducer.set_passes(passes)

        def exchange_state_dict(self) -> dict[str, Any]:
            """Return the state of the compressors, equal on all ranks. Collective: yes."""
            self._hvdtrain_exchange.reducer.synchronize_state()
            tensors, values = self._hvdtrain_exchange.reducer.state_dict()
            return {"tensors": tensors, "values": values}

        def load_exchange_state_dict(self, state: Mapping[str, Any]) -> None:
            """Load a state from `exchange_state_dict`, on every rank the same."""
            self._hvdtrain_exchange.reducer.load_state_dict(state["tensors"], state["values"])

    Distributed.__name__ = kind.__name__
    return Distributed
