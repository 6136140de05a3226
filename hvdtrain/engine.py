"""How the trainer sees an optimizer whose gradients are summed over ranks."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.comm.base import Comm
from hvdtrain.errors import TaskError
from hvdtrain.exchange.reducer import Reducer


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

        Returns tensors that hold all gradients, equal on all ranks, to take the norm of and to
        scale in place. The gradient of a parameter that nobody used is zero at every size.
        """
        ...

    def step(self) -> None:
        """Let the optimizer follow the gradients that `finish` left."""
        ...


def make_engine(optimizer: Optimizer, model: nn.Module, comm: Comm, compression: str) -> Engine:
    """Give an optimizer over the model's parameters the exchange that fits the job.

    Errors:
        TaskError: the optimizer holds a parameter that is not the model's.
    """
    parameters = _named(optimizer, model)
    return (
        LocalEngine(optimizer) if comm.size == 1 else ExchangeEngine(optimizer, Reducer(parameters, comm, compression))
    )


class LocalEngine:
    """One rank: nothing to exchange."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]

    def begin(self, micro_batches: int) -> None:
        """Clear gradients."""
        self.optimizer.zero_grad()

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`."""
        torch.autograd.backward(loss)

    def finish(self) -> list[Tensor]:
        """Give a zero gradient to parameters that have none, as an exchange would."""
        return [_gradient(parameter) for parameter in self._parameters]

    def step(self) -> None:
        """Follow the gradients."""
        self.optimizer.step()


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


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _named(optimizer: Optimizer, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strangers = [tuple(parameter.shape) for parameter in held if parameter not in names]
    if strangers:
        raise TaskError(
            "the task's optimizer holds parameters that are not the model's",
            expected="an optimizer made from model.parameters() of the same model that the task returns",
            found=f"{len(strangers)} other(s), of shapes {', '.join(map(str, strangers[:3]))}",
        )
    return [(names[parameter], parameter) for parameter in held if parameter.requires_grad]
