"""Everything that a run is at a step: one `state_dict`, used to save, to resume and to make ranks equal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.errors import CheckpointError, TaskError


@dataclass
class Progress:
    """How far a run has come.

    Attributes:
        step: optimizer steps done, skipped ones included.
        position: samples consumed.
        skipped: steps whose loss or gradient was not finite.
        skipped_in_row: how many of them came last.
        samples: in an epoch.
        data_id: of the task, see there.
        losses: of the newest steps that were applied, as many as a jump is measured against.
        left_out: ranges [begin, end) of positions that are passed over, in order: what roll backs went past.
        rolled_back: steps that were taken back for it.
        lr: learning rate of the last step, of the optimizer's first group; 0 before, and in older checkpoints.
    """

    step: int = 0
    position: int = 0
    skipped: int = 0
    skipped_in_row: int = 0
    samples: int = 0
    data_id: str = ""
    losses: list[float] = field(default_factory=list)
    left_out: list[list[int]] = field(default_factory=list)
    rolled_back: list[int] = field(default_factory=list)
    lr: float = 0.0


class Exchange(Protocol):
    """What keeps state between the exchanges of gradients: the plan of buckets, and what compression carries on."""

    def synchronize_state(self) -> None:
        """Make the state the same on all ranks. Collective: yes."""
        ...

    def synchronized_state(self) -> dict[str, Tensor]:
        """The tensors as `synchronize_state` would make them, which stay as they are. Collective: yes.

        To be read before the next step.
        """
        ...

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors by name, and plain values."""
        ...

    def load_state_dict(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Take them over."""
        ...


@dataclass(frozen=True)
class StateDict:
    """A snapshot: tensors by group and name, and what JSON holds.

    Attributes:
        tensors: {"model": {name: tensor}, "optimizer": {"name/slot": tensor}, "exchange": {"name/what": tensor}}; the
            last only where there is any.
        values: plain values.
    """

    tensors: Mapping[str, Mapping[str, Tensor]]
    values: Mapping[str, Any]

    @property
    def count(self) -> int:
        """Of the tensors, in all groups."""
        return sum(len(tensors) for tensors in self.tensors.values())


@dataclass
class TrainState:
    """The parts of a run that training changes.

    Attributes:
        model: its parameters and buffers.
        optimizer: its state, kept by parameter name: free of groups, of their order and of the number of ranks.
        scaler: fp16's loss scale.
        progress: how far the run has come.
        exchange: of the gradients; settled before it is saved. None where there is none.
    """

    model: nn.Module
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    progress: Progress
    exchange: Exchange | None = None

    def state_dict(self) -> StateDict:
        """The state, without copying tensors."""
        model, aliases = _unaliased(self.model.state_dict())
        slots, plain, groups = self._optimizer_state()
        carried, exchange = self.exchange.state_dict() if self.exchange is not None else ({}, None)
        values = {
            "progress": vars(self.progress).copy(),
            "aliases": aliases,
            "optimizer": plain,
            "groups": groups,
            "scaler": self.scaler.state_dict(),
            "exchange": exchange,
        }
        tensors = {"model": model, "optimizer": slots, **({"exchange": carried} if carried else {})}
        return StateDict(tensors, values)

    def load_state_dict(self, state: StateDict) -> None:
        """Take over a state; tensors are copied.

        Errors:
            CheckpointError: it is the state of another model or optimizer; nothing was changed.
        """
        model = dict(state.tensors["model"])
        model |= {alias: model[name] for alias, name in state.values["aliases"].items()}
        _check_fits(self.model.state_dict(), model)
        self._check_optimizer(state)
        self.model.load_state_dict(model)
        self._load_optimizer(state.tensors["optimizer"], state.values["optimizer"])
        for group, start in zip(self.optimizer.param_groups, self._groups_at_start, strict=True):
            group.update(start)
        for number, values in state.values["groups"].items():
            self.optimizer.param_groups[int(number)].update(values)
        if state.values["scaler"]:
            self.scaler.load_state_dict(state.values["scaler"])
        if self.exchange is not None and state.values.get("exchange"):  # checkpoints of 0.1 have none
            self.exchange.load_state_dict(state.tensors.get("exchange", {}), state.values["exchange"])
        self.progress = Progress(**state.values["progress"])

    def _names(self) -> dict[str, nn.Parameter]:
        of = {parameter: name for name, parameter in self.model.named_parameters()}
        return {of[p]: p for group in self.optimizer.param_groups for p in group["params"]}

    def __post_init__(self) -> None:
        """Note what the optimizer's groups hold before training."""
        self._groups_at_start = [self._group_values(group) for group in self.optimizer.param_groups]

    @staticmethod
    def _group_values(group: Mapping[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in group.items() if k not in ("params", "lr") and isinstance(v, (int, float, str, bool))}

    def _optimizer_state(self) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, dict[str, Any]]]:
        """Tensors and plain values by parameter and slot; what training has changed in each group.

        Errors:
            TaskError: the optimizer keeps state that cannot be saved.
        """
        slots: dict[str, Tensor] = {}
        plain: dict[str, Any] = {}
        for name, parameter in self._names().items():
            for slot, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    slots[f"{name}/{slot}"] = value
                elif value is None or isinstance(value, (int, float, str, bool)):
                    plain[f"{name}/{slot}"] = value
                else:
                    raise TaskError(
                        f"{type(self.optimizer).__name__} keeps state that cannot be saved: {slot} of {name}",
                        expected="tensors, numbers and strings",
                        found=type(value).__name__,
                        next_step="use an optimizer with flat state",
                    )
        # Some optimizers count in their groups. What the options set there stays the options' own.
        groups = {
            str(number): changed
            for number, (group, start) in enumerate(
                zip(self.optimizer.param_groups, self._groups_at_start, strict=True)
            )
            if (changed := {k: v for k, v in self._group_values(group).items() if v != start.get(k)})
        }
        return slots, plain, groups

    def _check_optimizer(self, state: StateDict) -> None:
        keys = [*state.tensors["optimizer"], *state.values["optimizer"]]
        strangers = {key.rpartition("/")[0] for key in keys} - self._names().keys()
        numbers = {str(number) for number in range(len(self.optimizer.param_groups))}
        strangers |= {f"group {number}" for number in state.values["groups"].keys() - numbers}
        if strangers:
            raise CheckpointError(
                "the checkpoint holds state of parameters or groups that the optimizer does not have",
                found=", ".join(sorted(strangers)[:3]),
                next_step="resume with the optimizer of the run, or start anew: --resume never --run_dir DIR",
            )

    def _load_optimizer(self, slots: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
        # torch's own load_state_dict wants numbers for parameters; it casts and moves state as each optimizer needs.
        names = {name: (index, parameter) for index, (name, parameter) in enumerate(self._names().items())}
        entries: dict[int, dict[str, Any]] = {}
        for key, value in [*slots.items(), *plain.items()]:
            name, _, slot = key.rpartition("/")
            index, parameter = names[name]
            entries.setdefault(index, {})[slot] = _stored_as(parameter, value) if isinstance(value, Tensor) else value
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": entries, "param_groups": groups})


def _stored_as(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """Return a copy of `value` with the parameter's strides, which torch's fused optimizers assume."""
    if value.shape != parameter.shape or parameter.is_contiguous():
        return value.clone()
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device, requires_grad=False).copy_(value)


def _unaliased(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tied tensors once, and which names stand for them too."""
    kept: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and place in seen:
            aliases[name] = seen[place]
        else:
            kept[name] = tensor
            seen[place] = name
    return kept, aliases


def _check_fits(model: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    ours, theirs = ({name: tuple(t.shape) for name, t in tensors.items()} for tensors in (model, saved))
    if ours == theirs:
        return
    differing = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    shown = "; ".join(f"{n}: {theirs.get(n, 'missing')}" for n in differing[:3])
    raise CheckpointError(
        "the checkpoint is of another model",
        expected="; ".join(f"{n}: {ours.get(n, 'no such tensor')}" for n in differing[:3]),
        found=f"{shown} ({len(differing)} of {len(ours)} tensors differ)",
        next_step="give the options of the model the run was started with, or another --run_dir",
    )
