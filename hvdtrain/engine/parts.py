"""What an engine is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.optim import Optimizer

from hvdtrain.comm.base import Comm
from hvdtrain.errors import TaskError
from hvdtrain.plan.plan import BF16_WEIGHTS, Plan
from hvdtrain.spans import Spans


@dataclass(frozen=True)
class EngineParts:
    """What an engine is made of.

    Attributes:
        styles: of the task, how to divide its modules; empty for those of the model.
    """

    model: nn.Module  # on the device already, unless the plan places it
    optimizer: Optimizer
    parameters: list[tuple[str, nn.Parameter]]  # of the optimizer, with their names in the model, in its order
    comm: Comm  # its ranks
    plan: Plan  # what they do
    device: torch.device  # of training
    spans: Spans | None = None  # record the exchange
    variables: Mapping[str, str] = field(default_factory=dict)  # of this process's environment
    styles: Mapping[str, str] = field(default_factory=dict)

    @property
    def weights(self) -> torch.dtype | None:
        """The format in which forward and backward get the parameters; None for their own."""
        return torch.bfloat16 if self.plan.precision == BF16_WEIGHTS else None

    def optimized(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters of the optimizer, also those that were added since the engine was made.

        Errors: TaskError: one is from outside the model.
        """
        if sum([len(group["params"]) for group in self.optimizer.param_groups]) != len(self.parameters):
            self.parameters[:] = named_parameters(self.optimizer, self.model)
        return self.parameters

    def uncompressed(self, comm: Comm | None = None) -> EngineParts:
        """Return the same without compression, for other ranks."""
        return replace(self, comm=comm or self.comm, plan=replace(self.plan, compression="none"))


def named_parameters(optimizer: Optimizer, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the optimizer's parameters with their names in the model, in its order.

    Errors: TaskError: one is from outside the model.
    """
    optimized = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    strangers = [tuple(parameter.shape) for parameter in optimized - set(model.parameters())]
    if strangers:
        raise TaskError(
            "the task's optimizer has parameters from outside the model",
            expected="an optimizer over model.parameters() of the model that the task returns",
            found=f"{len(strangers)} such parameter(s), of shapes {', '.join(map(str, strangers[:3]))}",
        )
    # In the model's order, not the optimizer's: the exchange follows the order of backward.
    return [(name, p) for name, p in model.named_parameters() if p in optimized]
