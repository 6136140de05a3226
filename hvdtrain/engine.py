"""How the trainer sees an optimizer whose gradients are summed over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.comm.base import Comm
from hvdtrain.compression.table import parse
from hvdtrain.errors import TaskError
from hvdtrain.exchange.reducer import Reducer
from hvdtrain.exchange.sparse import zero_rows
from hvdtrain.spans import Spans


class Engine(Protocol):
    """An optimizer and the exchange of its gradients.

    Attributes:
        optimizer: the one that was given.
    """

    optimizer: Optimizer

    def begin(self, micro_batches: int) -> None:
        """Clear gradients; this rank is about to run backward `micro_batches` times, 0 if it idles."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`, a scalar; the last one of a step starts the exchange."""
        ...

    def finish(self) -> list[Tensor]:
        """Wait until every gradient is the sum over ranks and micro-batches. Collective: yes.

        Returns all gradients, equal on all ranks, to take the norm of and to scale in place. That of a parameter
        which nobody used is zero at every size.
        """
        ...

    def close(self) -> None:
        """Let go of the parameters."""
        ...

    def step(self) -> None:
        """Let the optimizer follow the gradients that `finish` left."""
        ...

    def commit(self, *, applied: bool) -> None:
        """The step is over: keep what compression carries to the next one, or forget it if it was not applied."""
        ...

    def rescale(self, factor: float) -> None:
        """Gradients are multiplied by `factor` from now on, and so is what compression carries to the next step."""
        ...

    def settle(self) -> None:
        """Make the exchange's state the same on all ranks, so that one can save it. Collective: yes."""
        ...

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The exchange's state, tensors and plain values; equal on all ranks after `settle`."""
        ...

    def load_state_dict(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Take over the exchange's state."""
        ...

    def carried(self) -> dict[str, list[str]]:
        """Names of the parameters whose gradients each collective carries, by what its name begins with."""
        ...

    def buffers(self) -> list[Tensor]:
        """The memory that the exchange takes beside the gradients."""
        ...


def make_engine(
    optimizer: Optimizer, model: nn.Module, comm: Comm, compression: str, spans: Spans | None = None
) -> Engine:
    """Give an optimizer over the model's parameters the exchange that fits the job; `spans` is told of it.

    Errors:
        TaskError: the optimizer holds a parameter that is not the model's.
    """
    parameters = _named(optimizer, model)
    if comm.size == 1 and compression == "none":
        return LocalEngine(parameters, optimizer)

    def trained() -> list[tuple[str, nn.Parameter]]:
        return [(name, parameter) for name, parameter in parameters if parameter.requires_grad]

    return ExchangeEngine(optimizer, Reducer(trained, comm, parse(compression).load(), spans=spans))


class LocalEngine:
    """One rank: nothing to exchange."""

    def __init__(self, named_parameters: list[tuple[str, nn.Parameter]], optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._parameters = named_parameters
        self._sparse: set[str] = set()
        self._kept: tuple[Mapping[str, Tensor], Mapping[str, Any]] = ({}, {"plan": None, "ranks": 1})

    def begin(self, micro_batches: int) -> None:
        """Clear gradients."""
        self.optimizer.zero_grad()

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`."""
        torch.autograd.backward(loss)

    def finish(self) -> list[Tensor]:
        """Give a zero gradient to parameters that have none, as an exchange would."""
        gradients = []
        for name, parameter in self._parameters:
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = zero_rows(parameter) if name in self._sparse else torch.zeros_like(parameter)
            if parameter.grad.is_sparse:
                self._sparse.add(name)
                parameter.grad = parameter.grad.coalesce()
                gradients.append(parameter.grad._values())
            else:
                gradients.append(parameter.grad)
        return gradients

    def commit(self, *, applied: bool) -> None:
        """Do nothing."""

    def rescale(self, factor: float) -> None:
        """Do nothing."""

    def settle(self) -> None:
        """Do nothing."""

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return what several ranks have left, for the time when there are several again."""
        tensors, values = self._kept
        return dict(tensors), dict(values)

    def load_state_dict(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Keep it: one rank exchanges nothing."""
        self._kept = {name: tensor.clone() for name, tensor in tensors.items()}, values

    def step(self) -> None:
        """Follow the gradients."""
        self.optimizer.step()

    def carried(self) -> dict[str, list[str]]:
        """Return nothing: there is no exchange."""
        return {}

    def buffers(self) -> list[Tensor]:
        """Return nothing."""
        return []

    def close(self) -> None:
        """Do nothing."""


class ExchangeEngine:
    """Several ranks: gradients summed in buckets while backward runs."""

    def __init__(self, optimizer: Optimizer, reducer: Reducer) -> None:
        self.optimizer = optimizer
        self._reducer = reducer
        self._left = 0

    def begin(self, micro_batches: int) -> None:
        """Clear gradients; the number of backward passes is each rank's own."""
        self.optimizer.zero_grad()
        self._reducer.begin()
        self._left = micro_batches

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`; on the last pass, exchange each bucket once it is full."""
        self._left -= 1
        if self._left == 0:
            self._reducer.collect()
        torch.autograd.backward(loss)

    def finish(self) -> list[Tensor]:
        """Wait for the sums. Collective: yes."""
        return self._reducer.finish()

    def step(self) -> None:
        """Follow the gradients."""
        self.optimizer.step()

    def commit(self, *, applied: bool) -> None:
        """Keep or forget what compression carries to the next step."""
        self._reducer.commit(applied=applied)

    def rescale(self, factor: float) -> None:
        """Multiply what compression carries to the next step."""
        self._reducer.rescale(factor)

    def settle(self) -> None:
        """Make the state the same on all ranks. Collective: yes."""
        self._reducer.settle()

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The plan of the buckets, and the compressors' state."""
        return self._reducer.state_dict()

    def load_state_dict(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Take them over."""
        self._reducer.load_state_dict(tensors, values)

    def carried(self) -> dict[str, list[str]]:
        """Names of the parameters by bucket."""
        return self._reducer.carried()

    def buffers(self) -> list[Tensor]:
        """The buckets."""
        return self._reducer.buffers()

    def close(self) -> None:
        """Take the hooks off."""
        self._reducer.close()


def _named(optimizer: Optimizer, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    strangers = [tuple(parameter.shape) for parameter in held - set(model.parameters())]
    if strangers:
        raise TaskError(
            "the task's optimizer holds parameters that are not the model's",
            expected="an optimizer made from model.parameters() of the same model that the task returns",
            found=f"{len(strangers)} other(s), of shapes {', '.join(map(str, strangers[:3]))}",
        )
    # In the model's order, not the optimizer's: the exchange follows backward.
    return [(name, p) for name, p in model.named_parameters() if p in held]
