"""How the trainer sees an optimizer whose gradients are summed over ranks."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.comm.base import Comm
from hvdtrain.errors import TaskError


class Engine(Protocol):
    """An optimizer and the exchange of its gradients.

    Attributes:
        optimizer: whose `param_groups` and `state_dict` are those of the training.
    """

    optimizer: Optimizer

    def begin(self, micro_batches: int) -> None:
        """Clear gradients; this rank is about to run backward `micro_batches` times, 0 if it idles."""
        ...

    def finish(self) -> list[Tensor]:
        """Wait until every gradient is the sum over ranks and micro-batches. Collective: yes.

        Returns the gradients, equal on all ranks; that of a parameter nobody used is zero at every size.
        """
        ...

    def step(self) -> None:
        """Let the optimizer follow the gradients that `finish` left."""
        ...


def make_engine(optimizer: Optimizer, model: nn.Module, comm: Comm, compression: str) -> Engine:
    """Wrap an optimizer that has no state yet.

    Errors:
        TaskError: the optimizer holds a parameter that is not the model's.
    """
    parameters = _named(optimizer, model)
    if comm.size == 1:
        return LocalEngine(optimizer)
    return HorovodEngine(optimizer, parameters, compression)


class LocalEngine:
    """One rank: nothing to exchange."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._parameters = _trained(optimizer)

    def begin(self, micro_batches: int) -> None:
        """Clear gradients."""
        self.optimizer.zero_grad()

    def finish(self) -> list[Tensor]:
        """Give a zero gradient to parameters that have none, as an exchange would."""
        return [_gradient(parameter) for parameter in self._parameters]

    def step(self) -> None:
        """Follow the gradients."""
        self.optimizer.step()


class HorovodEngine:
    """Horovod's own DistributedOptimizer: an allreduce a gradient, started by backward's hooks."""

    def __init__(
        self, optimizer: Optimizer, named_parameters: list[tuple[str, nn.Parameter]], compression: str
    ) -> None:
        from hvdtrain.comm.horovod import distributed_optimizer

        self.optimizer: Optimizer = distributed_optimizer(optimizer, named_parameters, compression)
        self._wrapped = self.optimizer
        self._parameters = _trained(optimizer)

    def begin(self, micro_batches: int) -> None:
        """Clear gradients; exchange after `micro_batches` backward passes, a number that is each rank's own."""
        self._wrapped.zero_grad()
        self._wrapped.set_backward_passes_per_step(micro_batches)

    def finish(self) -> list[Tensor]:
        """Wait for the sums. Collective: yes."""
        self._wrapped.synchronize()
        return [_gradient(parameter) for parameter in self._parameters]

    def step(self) -> None:
        """Follow the gradients, without another exchange."""
        with self._wrapped.skip_synchronize():
            self._wrapped.step()


def _trained(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


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
    return [(names[parameter], parameter) for parameter in held]
