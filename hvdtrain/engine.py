"""How the trainer sees an optimizer whose gradients are summed over ranks."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.comm.base import Comm
from hvdtrain.errors import TaskError
from hvdtrain.exchange.reducer import Reducer, refuse_sparse
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

    def carried(self) -> dict[str, list[str]]:
        """Names of the parameters whose gradients each collective carries, by the collective's name."""
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
    if comm.size == 1:
        return LocalEngine(parameters, optimizer)
    return ExchangeEngine(optimizer, Reducer(parameters, comm, compression, spans=spans))


class LocalEngine:
    """One rank: nothing to exchange."""

    def __init__(self, named_parameters: list[tuple[str, nn.Parameter]], optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._parameters = named_parameters

    def begin(self, micro_batches: int) -> None:
        """Clear gradients."""
        self.optimizer.zero_grad()

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`."""
        torch.autograd.backward(loss)

    def finish(self) -> list[Tensor]:
        """Give a zero gradient to parameters that have none, as an exchange would."""
        for name, parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            refuse_sparse(name, parameter.grad)
        return [parameter.grad for _, parameter in self._parameters if parameter.grad is not None]

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
    return [(name, p) for name, p in model.named_parameters() if p in held and p.requires_grad]
