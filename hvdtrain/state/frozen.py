"""What checkpoints leave out: frozen parameters, because a digest is enough, and unknown state of an optimizer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.errors import CheckpointError, TaskError
from hvdtrain.state.placeholder import Placeholder

FROZEN = "frozen"  # the key of the digest among the plain values of a state

_NUMBERS = (bool, int, float, str)


@dataclass
class FrozenWeights:
    """The parameters of a model that were frozen when training started."""

    names: frozenset[str]  # of these parameters, other names of tied ones included
    digest: str  # of names and values; empty if this process never had the values: then rank 0's counts
    hashes: Tensor | None = None  # of the values here when training started, to detect changes; None before

    def left_out(self, model: nn.Module) -> frozenset[str]:
        """Return what a checkpoint leaves out.

        Errors: TaskError: one of them is trained now, so that its values would be lost.
        """
        trained = [name for name, p in model.named_parameters() if p.requires_grad and name in self.names]
        if trained:
            raise changed(trained[0], "it requires a gradient now")
        return self.names

    def facts(self) -> dict[str, Any]:
        """Return what a state has of them, for JSON."""
        return {"digest": self.digest, "tensors": len(self.names)}


def find_frozen(model: nn.Module) -> FrozenWeights | None:
    """Return the frozen parameters of a model, which is not divided yet; None if there are none."""
    every = dict(model.named_parameters(remove_duplicate=False))
    names = frozenset(name for name, parameter in every.items() if not parameter.requires_grad)
    if not names:
        return None
    if any(isinstance(every[name], Placeholder) for name in names):
        return FrozenWeights(names, "")
    total = xxhash.xxh3_128()
    for name, parameter in sorted(model.named_parameters()):
        if name in names:
            total.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
            flat = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            total.update(flat.numpy().data)
    return FrozenWeights(names, total.hexdigest())


def check_stored(
    own: FrozenWeights | None, stored: Mapping[str, Any] | None, tensors: Collection[str]
) -> frozenset[str]:
    """Return which frozen parameters a state does not have, and so keep their values.

    A state that one rank sends to others has them. Then its digest is also that of this process.

    `own`: of this run; None if its checkpoints have all parameters. `stored`: the `facts` of the state; None if it has
    all parameters. `tensors`: names of the tensors of the model in the state.

    Errors: CheckpointError: the state is one of other frozen values, or of another way to save.
    """
    if own is None:
        if stored is None:
            return frozenset()
        raise CheckpointError(
            "the checkpoint has only the trained parameters of its run, because the task made the others again",
            expected="a checkpoint with all parameters",
            found=f"a digest of {stored['tensors']} frozen tensors",
            next_step="resume with the model options of that run, such as --model.lora, or use another --run_dir",
        )
    if stored is None:
        raise CheckpointError(
            "the checkpoint has all parameters of its run, but this run saves only those that it trains",
            expected=f"a checkpoint with a digest of {len(own.names)} frozen tensors",
            found="a checkpoint of a run without frozen parameters, such as one without --model.lora",
            next_step="resume with the model options of that run, or use another --run_dir",
        )
    if own.names <= set(tensors):
        own.digest = stored["digest"]
        return frozenset()
    if own.digest != stored["digest"]:
        raise CheckpointError(
            "the frozen parameters of this run are not those that the checkpoint was trained with",
            expected=f"{stored['tensors']} frozen tensors with digest {stored['digest'][:12]}",
            found=f"{len(own.names)} with digest {own.digest[:12]}",
            next_step="use the weights, --seed, data and model options of that run, or another --run_dir",
        )
    return own.names


def changed(name: str, how: str) -> TaskError:
    """Return the error of a parameter that checkpoints leave out, though training changes it."""
    return TaskError(
        f"{name} was frozen when training started, and checkpoints leave it out, but {how}",
        expected="values that stay as the task made them",
        next_step="return Task(..., remakes_frozen=False), so that checkpoints have all parameters",
        everywhere=True,
    )


class UnsavedValues:
    """Finds what an optimizer changes in training outside of its `state` and of the numbers in its groups.

    `TrainState` saves only those. An optimizer that counts its steps in an attribute resumes from step 0.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        # Attributes of torch's base class, fused optimizers and schedulers are not state: hooks, what was checked.
        self._known = vars(torch.optim.SGD([nn.Parameter(torch.empty(0))], fused=True)).keys() | {"_opt_called"}
        self._start = self._marks()

    def names(self) -> list[str]:
        """Return the names of the values that have changed."""
        return sorted(name for name, mark in self._marks().items() if mark != self._start.get(name))

    def _marks(self) -> dict[str, Any]:
        found = {name: value for name, value in vars(self._optimizer).items() if name not in self._known}
        for number, group in enumerate(self._optimizer.param_groups):
            kept = {k: v for k, v in group.items() if k not in ("params", "lr") and not isinstance(v, _NUMBERS)}
            found |= {f"{name} of group {number}": value for name, value in kept.items()}
        return {name: self._mark(value) for name, value in found.items()}

    def _mark(self, value: Any) -> Any:
        """Return what differs after a change."""
        if isinstance(value, Tensor):
            return id(value), value._version
        if isinstance(value, Optimizer):  # a wrapped one
            return None if value.state is self._optimizer.state else self._mark(value.state)
        if isinstance(value, Mapping):
            return [self._mark(each) for each in value.values()]
        if isinstance(value, (list, tuple)):
            return [self._mark(each) for each in value]
        return value if isinstance(value, _NUMBERS) else None
