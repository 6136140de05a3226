"""Give a user's optimizer the exchange of gradients, as `hvd.DistributedOptimizer` does, with our reducer."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from hvdtrain.errors import TaskError
from hvdtrain.exchange.backward_passes import uncompiled
from hvdtrain.exchange.own_loop import Exchange

_exchanging: WeakSet[Optimizer] = WeakSet()
_numbers: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)


def fresh_name(process_set: Any) -> str:
    """Return the prefix of the collectives' names of a new optimizer of a Horovod process set.

    It is equal on all ranks of the set if they make its optimizers in the same order.
    """
    own = process_set.process_set_id
    # A removed set's number is used again, maybe for other ranks. The global set keeps its number when ranks change.
    number = next(_numbers[tuple(process_set.ranks) if own else ()])
    return "gradients" + (f".set{own}" if own else "") + (f".{number}" if number else "")


def exchanging(optimizer: Optimizer, exchange: Exchange) -> Optimizer:
    """Give an optimizer the exchange. It stays the same object; its class becomes a subclass of its former class.

    So existing schedulers, gradient scalers and references stay valid, its state stays, and
    ``isinstance(optimizer, torch.optim.SGD)`` holds. An older optimizer with some of its parameters ends its exchange.

    Errors: TaskError: it has an exchange already.
    """
    refuse_second(optimizer)
    own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for other in list(_exchanging):
        if any(parameter in own for group in other.param_groups for parameter in group["params"]):
            other._hvdtrain_exchange.replace()  # type: ignore[attr-defined]
    _exchanging.add(optimizer)
    kind = type(optimizer)
    optimizer.__class__ = _distributed(kind)
    # An existing scheduler has set an attribute that wraps the former class's step.
    optimizer.__dict__.pop("step", None)
    optimizer._hvdtrain_exchange = exchange  # type: ignore[attr-defined]
    support_grad_scaler(optimizer, exchange)
    return optimizer


def refuse_second(optimizer: Optimizer) -> None:
    """Check that an optimizer has no exchange. Errors: TaskError."""
    if hasattr(optimizer, "_hvdtrain_exchange"):
        raise TaskError("the optimizer is distributed already", next_step="call DistributedOptimizer once")


def _distributed(kind: type[Optimizer]) -> type[Optimizer]:
    class Distributed(kind):  # type: ignore[misc, valid-type]
        # Horovod's broadcast_optimizer_state recognizes distributed optimizers by this module name.
        __module__ = "horovod.torch.optimizer"
        __qualname__ = kind.__name__

        @uncompiled
        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            """Sum the gradients over ranks, unless that was done, and update the parameters. Collective: yes."""
            self._opt_called = True  # schedulers warn if it is missing
            return self._hvdtrain_exchange.step(partial(kind.step, self), closure)

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # so schedulers do not wrap it again
        step.hooked = True  # type: ignore[attr-defined]  # nor does torch when it loads a state: `kind.step` calls the hooks

        @uncompiled
        def zero_grad(self, *arguments: Any, **keywords: Any) -> None:
            """Clear the gradients; none may be in an exchange."""
            self._hvdtrain_exchange.zero_grad(partial(kind.zero_grad, self), *arguments, **keywords)

        @uncompiled
        def synchronize(self) -> None:
            """Make every gradient the sum (or mean) over ranks; each call sums again. Collective: yes."""
            self._hvdtrain_exchange.synchronize()

        @property
        def _handles(self) -> dict[Any, Any]:
            """What is being exchanged, as Horovod's optimizer names it."""
            begun = self._hvdtrain_exchange.reducer.begun
            return dict.fromkeys(self._parameter_names, (None, None)) if begun else {}

        def skip_synchronize(self) -> Any:
            """Return a context in which `step` uses the gradients without an exchange: `synchronize`, clip, `step`."""
            return self._hvdtrain_exchange.skipping()

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            """Load a state, on any of the ranks, and drop the current step."""
            self._hvdtrain_exchange.load_state_dict(partial(kind.load_state_dict, self), state_dict)

        def state_dict(self) -> dict[str, Any]:
            """Return the state; an error if the optimizer is divided."""
            state: dict[str, Any] = self._hvdtrain_exchange.state_dict(partial(kind.state_dict, self))
            return state

        def gather_state_dict(self) -> dict[str, Any]:
            """Return the whole state on rank 0, as `state_dict` of an undivided optimizer; an empty one on others.

            If the optimizer is divided and compressed, this also makes the model's parameters exact. Collective: yes.
            """
            state: dict[str, Any] = self._hvdtrain_exchange.gather_state_dict(partial(kind.state_dict, self))
            return state

        @uncompiled
        def clip_grad_norm_(self, max_norm: float) -> Tensor:
            """Clip the summed gradients by their norm, between backward and `step`; return it. Collective: yes."""
            total: Tensor = self._hvdtrain_exchange.clip(self, max_norm)
            return total

        def add_param_group(self, param_group: dict[str, Any]) -> None:
            """Add parameters, on every rank; an error if the optimizer is divided."""
            self._hvdtrain_exchange.add_param_group(partial(kind.add_param_group, self), param_group)

        def set_backward_passes_per_step(self, passes: int) -> None:
            """Exchange gradients after this many backward passes, from the next step on."""
            self.backward_passes_per_step = passes
            self._hvdtrain_exchange.reducer.set_passes(passes)

        def exchange_state_dict(self) -> dict[str, Any]:
            """Return the state of the compressors, equal on all ranks and valid until the next step. Collective: yes.

            Training continues as without it, unless the optimizer is divided.
            """
            reducer = self._hvdtrain_exchange.reducer
            tensors = reducer.synchronized_state()
            return {"tensors": tensors, "values": reducer.state_dict()[1]}

        def load_exchange_state_dict(self, state: Mapping[str, Any]) -> None:
            """Load a state from `exchange_state_dict`, on every rank the same."""
            self._hvdtrain_exchange.reducer.load_state_dict(state["tensors"], state["values"])

    Distributed.__name__ = kind.__name__
    return Distributed


_exchanges: WeakValueDictionary[int, Exchange] = WeakValueDictionary()
"""By the id of their optimizers, which GradScaler uses too."""


def support_grad_scaler(optimizer: Optimizer, exchange: Exchange) -> None:
    """Sum the gradients before a GradScaler unscales them, and multiply the residuals when its scale changes.

    GradScaler has no hooks for this. So two of its methods are wrapped once, for all instances: `update`, and that by
    which `unscale_` and `step` read the gradients.
    """
    _exchanges[id(optimizer)] = exchange
    unscale, update = torch.amp.GradScaler._unscale_grads_, torch.amp.GradScaler.update
    if hasattr(update, "_hvdtrain_wraps"):
        return

    @wraps(unscale)
    def unscale_summed(self: torch.amp.GradScaler, optimizer: Optimizer, *arguments: Any) -> dict[torch.device, Tensor]:
        exchange, own = _exchanges.get(id(optimizer)), partial(unscale, self, optimizer, *arguments)
        return own() if exchange is None else exchange.unscale(own)

    @wraps(update)
    def update_all(self: torch.amp.GradScaler, new_scale: float | Tensor | None = None) -> None:
        found = [exchange for number in self._per_optimizer_states if (exchange := _exchanges.get(number))]
        found = [exchange for exchange in found if exchange.reducer.keeps_error]
        before = self.get_scale() if found else 1.0  # waits for the device
        update(self, new_scale)
        if found and (after := self.get_scale()) != before:
            for exchange in found:
                exchange.reducer.rescale(after / before)

    update_all._hvdtrain_wraps = True  # type: ignore[attr-defined]
    torch.amp.GradScaler._unscale_grads_ = unscale_summed  # type: ignore[assignment, method-assign]
    torch.amp.GradScaler.update = update_all  # type: ignore[method-assign]
