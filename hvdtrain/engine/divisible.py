"""What engines share that divide parameters among ranks: what can be divided, and the optimizer of the owned part."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.comm.base import Comm
from hvdtrain.engine.sums import Sums
from hvdtrain.exchange.norms import norm, squared_norm, squares_by_row
from hvdtrain.exchange.residuals import Undelivered
from hvdtrain.state.divided import local, place_of, ranks_with_rows, whole_shape
from hvdtrain.state.exchange_state import Owned

BY_ELEMENT = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
"""Optimizers of torch that update each element by itself. Others may need whole tensors."""


def updates_by_element(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is known to update each element by itself, so that it may have rows of tensors.

    Those of torch are known; the class of another one says so by an attribute `updates_by_element` that is True.
    """
    kind = type(optimizer)
    if getattr(kind, "updates_by_element", False) is True:
        return True
    return f"{kind.__module__}.{kind.__qualname__}" in {f"torch.optim.{n.lower()}.{n}" for n in BY_ELEMENT}


def divides_rows(optimizer: Optimizer) -> bool:
    """Return whether it may get elements of a tensor, in one dimension: one of a user may look at the dimensions."""
    return type(optimizer).__module__.startswith(("torch.optim.", "hvdtrain."))


def whole_parameters(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> list[bool]:
    """Return, for each parameter, whether one rank must own all of it; rows of others may be divided.

    An optimizer lists such parameters by a method `needs_whole`, as `hvdtrain.muon.Muon` does.
    """
    if (listed := getattr(optimizer, "needs_whole", None)) is not None:
        whole = set(listed())
    else:
        whole = set() if updates_by_element(optimizer) else set(parameters)
    return [parameter in whole or not parameter.is_contiguous() for parameter in parameters]


def sparse_gradients(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return the parameters with sparse gradients, as of ``nn.Embedding(sparse=True)``, and their modules' names."""
    makers = [(name, module) for name, module in model.named_modules() if getattr(module, "sparse", None) is True]
    return {p: name for name, module in makers for p in module.parameters(recurse=False)}


def own_rows(parameter: nn.Parameter) -> Owned:
    """Return this rank's part of a parameter that torch has divided, as one of its optimizer, in the same memory."""
    part, place = local(parameter), place_of(parameter)
    owners = ranks_with_rows(parameter)
    mine = nn.Parameter(part, requires_grad=parameter.requires_grad) if part.numel() else None
    return Owned(mine, place, owners)


def norm_of_owned(squared: Tensor, comm: Comm, model: nn.Module, name: str = "gradients") -> Tensor:
    """Return the norm of the whole gradient from the `squared` one of what each rank owns alone. Collective: yes."""
    squared = squared.reshape(1).to(next(model.parameters()).device)  # where it is not yet if this rank owns nothing
    return norm(comm.allreduce(squared, name=f"{name}/norm").wait())


def norm_by_row(
    owned: Mapping[str, Owned], parameters: Mapping[str, Tensor], comm: Comm, name: str = "gradients"
) -> Tensor:
    """Return the norm of the whole gradient, with the same bits on any number of owners of rows. Collective: yes.

    `parameters` of the model, by name, in an order that is equal on all ranks.
    """
    sizes = {n: math.prod(whole_shape(p)[:1]) for n, p in parameters.items() if p.requires_grad}
    device = local(next(iter(parameters.values()))).device
    rows = torch.zeros(sum(sizes.values()), dtype=torch.float64, device=device)
    for n, of_parameter in zip(sizes, torch.split(rows, [*sizes.values()]), strict=True):
        own = owned.get(n)
        if own is not None and own.parameter is not None and own.parameter.grad is not None:
            found = squares_by_row([own.parameter.grad], [own.parameter])
            begin = own.place.offset[0] if own.place is not None and own.place.offset else 0
            of_parameter[begin : begin + len(found)] = found
    return norm(comm.allreduce(rows, name=f"{name}/norm").wait().sum())


def norm_of_parts(owned: Mapping[str, Owned], comm: Comm, model: nn.Module) -> Tensor:
    """Return the norm of the whole gradient, where several ranks hold a part. Collective: yes.

    Each rank adds its share of what several ranks own.
    """
    by_holders: dict[int, list[Tensor]] = {}
    for own in owned.values():
        if own.parameter is not None and own.parameter.grad is not None:
            holders = comm.size if own.place is None else len(own.place.ranks)
            by_holders.setdefault(holders, []).append(own.parameter.grad)
    none = torch.zeros((), dtype=torch.float64, device=local(next(model.parameters())).device)
    parts = [(squared_norm(held) / holders).to(none.device) for holders, held in by_holders.items()]
    squared = torch.stack([none, *parts]).sum().reshape(1)  # a rank may own nothing
    return norm(comm.allreduce(squared, name="gradients/norm").wait())


def use_owned(optimizer: Optimizer, names: Mapping[nn.Parameter, str], owned: Mapping[str, Owned]) -> None:
    """Let the optimizer's groups contain what this rank owns of the parameters in `names`, with its state of that."""
    for group in optimizer.param_groups:
        kept = []
        for parameter in group["params"]:
            if parameter not in names:  # owned already
                kept.append(parameter)
                continue
            own, state = owned.get(names[parameter]), optimizer.state.pop(parameter, {})
            if own is not None and own.parameter is not None:
                kept.append(own.parameter)
                if state:  # made by the optimizer before the first step
                    optimizer.state[own.parameter] = {
                        slot: _own_state(own, value) if isinstance(value, Tensor) else value
                        for slot, value in state.items()
                    }
        group["params"] = kept


def _own_state(own: Owned, value: Tensor) -> Tensor:
    assert own.parameter is not None
    kept = own.cut(value).clone()
    return kept.to(own.parameter.device) if kept.dim() else kept  # numbers may stay on the host


class DividedSums(Sums):
    """The sums of a rank that updates a part of the parameters, and delivers residuals of earlier compressed steps.

    A subclass sets `_owned`, and adds the sums in `_undelivered` to the gradients of a step, or has other residuals.
    """

    _owned: Mapping[str, Owned]

    def __init__(self, model: nn.Module, comm: Comm) -> None:
        self._model, self._comm = model, comm
        self._undelivered = Undelivered(self._delivers)
        self.residuals = self._undelivered

    def owned(self) -> Mapping[str, Owned]:
        """Return what this rank's optimizer updates."""
        return self._owned

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the norm of the whole gradient. Collective: yes."""
        return norm_of_owned(squared_norm(gradients), self._comm, self._model)

    def _delivers(self) -> set[str]:
        return {name for name, p in self._model.named_parameters() if p.requires_grad} & self.owned().keys()

    def leave_out(self, numbers: Sequence[int]) -> None:
        """Remove the gradients of parameters that no rank has used, unless a residual is their sum. Collective: yes."""
        trained = self._trained_names()
        held = [self.owned().get(trained[number]) for number in numbers]
        owned = [None if each is None else each.parameter for each in held]
        delivered = torch.zeros(len(owned), dtype=torch.int64)
        if owned and self._may_owe():
            for number, each in enumerate(owned):
                delivered[number] = each is not None and each.grad is not None and bool(each.grad.any())
            self._comm.allreduce(delivered, name="gradients/unused").wait()
        for each, of_residual in zip(owned, delivered.tolist(), strict=True):
            if each is not None and not of_residual:
                each.grad = None

    def _may_owe(self) -> bool:
        """Return whether a sum may be a residual; equal on all ranks."""
        return True

    def _trained_names(self) -> list[str]:
        """Return the names of all trained parameters, equal on all ranks."""
        raise NotImplementedError
