"""The whole state of a run at a step: one `state_dict` to save, to resume and to make ranks equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.errors import CheckpointError, TaskError
from hvdtrain.state.divided import is_divided, local, on_stages, place_of, take_rows, whole_shape
from hvdtrain.state.exchange_state import MASTER, Exchange, Owned
from hvdtrain.state.extras import GROUP as EXTRAS
from hvdtrain.state.extras import Stateful, extra_state, load_extras
from hvdtrain.state.frozen import FROZEN, FrozenWeights, check_stored
from hvdtrain.state.pieces import Key, Part, Place, StateDict, Whole, lazily, named_like, specs

NUMBERS = "optimizer_values"  # the group of plain numbers in the state of a divided optimizer
_SPARSE = ".sparse"
"""Ends the name of a slot that is sparse in the optimizer, such as SGD's momentum of an embedding, and saved dense."""
_NUMBER_TYPES = {bool: torch.bool, int: torch.int64}


@dataclass
class Progress:
    """The progress of a run."""

    step: int = 0  # optimizer steps done, including skipped ones
    position: int = 0  # samples consumed
    skipped: int = 0  # number of steps with a loss or gradient that was not finite
    skipped_in_row: int = 0  # number of these at the end
    samples: int = 0  # samples per epoch; 0 for an iterable data set
    data_id: str = ""  # see `Task`
    losses: list[float] = field(default_factory=list)  # of the newest applied steps, to detect a loss spike
    left_out: list[list[int]] = field(default_factory=list)  # positions [begin, end) that roll backs skipped, in order
    rolled_back: list[int] = field(default_factory=list)  # steps that were rolled back because of them
    data_state: dict[str, Any] = field(default_factory=dict)  # place in an iterable data set, at `position` or before
    lr: float = 0.0  # of the last step in the optimizer's first group; 0 before
    threads: int = 0  # of torch on each rank, where bits depend on it; else 0


_VALUES = {"progress", "aliases", "optimizer", "groups", "scaler", "exchange", FROZEN, EXTRAS}


def check_values(path: Path, values: Mapping[str, Any]) -> None:
    """Check the plain values of the checkpoint in `path`, as far as every run can.

    Errors: CheckpointError: there are unknown ones; others: there are impossible ones.
    """
    progress, known = values["progress"], vars(Progress())
    if unknown := [*(values.keys() - _VALUES), *(f"progress.{name}" for name in progress.keys() - known.keys())]:
        raise CheckpointError(
            f"{path} has values that this version does not know",
            found=", ".join(sorted(unknown)[:3]),
            next_step="read it with the version of hvdtrain that wrote it",
        )
    for name, value in progress.items():
        kinds = (int, float) if isinstance(known[name], float) else (type(known[name]),)
        if type(value) not in kinds or (isinstance(value, int) and not 0 <= value < 1 << 62):
            raise ValueError(f"{name} of its progress is {value!r}")
    if (position := progress.get("position", 1 << 62)) < (step := progress["step"]):
        raise ValueError(f"it has position {position} after {step} steps, and each step has samples")


@dataclass
class TrainState:
    """The parts of a run that training changes."""

    model: nn.Module
    optimizer: Optimizer  # its state is saved by parameter name, independent of groups, order and world size
    scaler: torch.amp.GradScaler  # loss scaler of fp16
    progress: Progress
    exchange: Exchange | None = None  # synchronized before it is saved
    frozen: FrozenWeights | None = None  # parameters that checkpoints leave out; see `Task.remakes_frozen`
    extras: Mapping[str, Stateful] = field(default_factory=dict)  # callbacks by name

    def state_dict(self, *, with_frozen: bool = False) -> StateDict:
        """Return the pieces that this rank holds, without copying tensors.

        Without those of `frozen`, as for a checkpoint, unless they are asked for.
        """
        if self.exchange is not None:
            self.exchange.complete()
        left_out = frozenset() if self.frozen is None or with_frozen else self.frozen.left_out(self.model)
        every = self.model.state_dict(keep_vars=True)  # the parameters say how they are divided
        kept, aliases = _split_aliases({name: tensor for name, tensor in every.items() if name not in left_out})
        model = {name: local(tensor) for name, tensor in kept.items()}
        slots, plain, groups, places = self._optimizer_state()
        places |= {("model", name): place_of(tensor) for name, tensor in kept.items() if is_divided(tensor)}
        residuals, exchange = self.exchange.state_dict() if self.exchange is not None else ({}, None)
        for key in residuals:
            if self.exchange is not None and (place := self.exchange.state_place(key)) is not None:
                places["exchange", key] = place
        extra_tensors, extra_values, extra_places = extra_state(self.extras, self._parameter)
        places |= extra_places
        values = {
            "progress": vars(self.progress).copy(),
            "aliases": aliases,
            "optimizer": plain,
            "groups": groups,
            "scaler": self.scaler.state_dict(),
            "exchange": exchange,
            **({FROZEN: self.frozen.facts()} if self.frozen is not None else {}),
            **({EXTRAS: extra_values} if extra_values else {}),
        }
        rest = {"exchange": residuals, EXTRAS: extra_tensors}
        tensors = {"model": model, **slots, **{group: found for group, found in rest.items() if found}}
        return StateDict(tensors, values, places)

    def load_state_dict(self, state: StateDict) -> None:
        """Load a state of whole tensors, or of the pieces that this rank holds; tensors are copied.

        Errors: CheckpointError if it is the state of another model or optimizer. Nothing was changed.
        """
        if self.exchange is not None:
            self.exchange.complete()
        loaded, strict = self._checked_model(state)
        self._check_optimizer(state)
        self.model.load_state_dict(loaded, strict=strict)
        numbers = {key: value.item() for key, value in state.tensors.get(NUMBERS, {}).items()}
        self._load_optimizer(state.tensors["optimizer"], {**state.values["optimizer"], **numbers})
        for group, start in zip(self.optimizer.param_groups, self._groups_at_start, strict=True):
            group.update(start)
        for number, values in state.values["groups"].items():
            self.optimizer.param_groups[int(number)].update(values)
        if state.values["scaler"]:
            self.scaler.load_state_dict(state.values["scaler"])
        if self.exchange is not None:
            values = state.values["exchange"] or {"plan": None, "ranks": 1}
            self.exchange.load_state_dict(state.tensors.get("exchange", {}), values)
        load_extras(self.extras, state, self._parameter)
        self.progress = Progress(**state.values["progress"])

    def load_model(self, state: StateDict) -> None:
        """Load only the model's part of a state. Errors: CheckpointError if it is that of another model."""
        loaded, strict = self._checked_model(named_like(state, self.model.state_dict()))
        self.model.load_state_dict(loaded, strict=strict)

    def _checked_model(self, state: StateDict) -> tuple[dict[str, Tensor], bool]:
        """Return the tensors to load into the model, and whether they are all."""
        stored = state.tensors["model"]
        names = {**{name: name for name in stored}, **state.values["aliases"]}
        left_out = check_stored(self.frozen, state.values.get(FROZEN), names)
        own = {name: tensor for name, tensor in self.model.state_dict(keep_vars=True).items() if name not in left_out}
        shapes = specs(stored)
        _check_shapes(own, {name: shapes[stored_name][0] for name, stored_name in names.items()})
        return {name: take_rows(lazily(stored, source), own.get(name)) for name, source in names.items()}, not left_out

    def held_part(self, group: str, name: str, shape: Sequence[int]) -> Part | EllipsisType | None:
        """Return which part of a whole tensor of some shape this rank holds; an ellipsis for all, None for nothing."""
        own_name = name if group == "model" else name.partition("/")[2] if group == EXTRAS else ""
        if own_name and (parameter := self._parameter(own_name)) is not None and is_divided(parameter):
            return place_of(parameter).part(local(parameter).shape)
        if group == "exchange" and self.exchange is not None and not self.exchange.keeps(name):
            return None
        is_owned = group in ("optimizer", NUMBERS) or (group == "exchange" and name.endswith(MASTER))
        if not is_owned or (own := self._owned().get(name.rpartition("/")[0])) is None:
            return ...
        if own.parameter is None:
            return None
        return own.place.part(own.parameter.shape) if own.place and own.place.shape == tuple(shape) else ...

    def optimized(self) -> Set[str]:
        """Return the names of the parameters that the optimizers of all ranks update."""
        return self._owned().keys()

    def _parameter(self, name: str) -> Tensor | None:
        module, _, last = name.rpartition(".")
        try:
            return self.model.get_submodule(module)._parameters.get(last)
        except AttributeError:  # the model saves under names of its own
            return None

    def _owned(self) -> Mapping[str, Owned]:
        if self.exchange is not None and (owned := self.exchange.owned()) is not None:
            return owned
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return {names[p]: Owned(p) for group in self.optimizer.param_groups for p in group["params"]}

    def __post_init__(self) -> None:
        """Record the values in the optimizer's groups before training."""
        self._groups_at_start = [self._group_values(group) for group in self.optimizer.param_groups]

    @staticmethod
    def _group_values(group: Mapping[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in group.items() if k not in ("params", "lr") and isinstance(v, (int, float, str, bool))}

    def _optimizer_state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any], dict[str, Any], dict[Key, Place]]:
        """Return tensors, plain values by parameter and slot, changed values of groups, and places.

        Errors: TaskError if the optimizer has state that cannot be saved.
        """
        tensors: dict[str, dict[str, Tensor]] = {"optimizer": {}}
        plain: dict[str, Any] = {}
        places: dict[Key, Place] = {}
        for name, own in self._owned().items():
            slots = self.optimizer.state.get(own.parameter, {}) if own.parameter is not None else {}
            for slot, value in slots.items():
                kind = "optimizer"
                if own.place is not None and isinstance(value, (int, float)):  # other ranks do not have it
                    kind, value = NUMBERS, torch.tensor(value, dtype=_NUMBER_TYPES.get(type(value), torch.float64))
                if isinstance(value, Tensor):
                    if value.is_sparse:
                        slots[slot] = value = value.coalesce()  # a resumed run adds up the same numbers
                    key, value = as_saved(f"{name}/{slot}", value)
                    tensors.setdefault(kind, {})[key] = value
                    if (place := own.place_of(value)) is not None:
                        places[kind, key] = place
                elif own.place is None and (value is None or isinstance(value, (int, float, str, bool))):
                    plain[f"{name}/{slot}"] = value
                else:
                    raise TaskError(
                        f"{type(self.optimizer).__name__} has state that cannot be saved: {slot} of {name}",
                        expected="tensors, numbers and strings" if own.place is None else "tensors and numbers",
                        found=type(value).__name__,
                        next_step="use an optimizer with flat state",
                    )
        # Some optimizers count in their groups. Values that options set there are not saved.
        groups = {}
        for number, (group, start) in enumerate(zip(self.optimizer.param_groups, self._groups_at_start, strict=True)):
            if changed := {k: v for k, v in self._group_values(group).items() if v != start.get(k)}:
                groups[str(number)] = changed
        return tensors, plain, groups, places

    def _check_optimizer(self, state: StateDict) -> None:
        keys = [*state.tensors["optimizer"], *state.tensors.get(NUMBERS, {}), *state.values["optimizer"]]
        unknown = {key.rpartition("/")[0] for key in keys} - self._owned().keys()
        numbers = {str(number) for number in range(len(self.optimizer.param_groups))}
        unknown |= {f"group {number}" for number in state.values["groups"].keys() - numbers}
        if unknown:
            raise CheckpointError(
                "the checkpoint contains parameters or groups that the optimizer does not have",
                found=", ".join(sorted(unknown)[:3]),
                next_step="resume with the optimizer of the run, or start a new run: --resume never --run_dir DIR",
            )

    def _load_optimizer(self, slots: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
        # torch's load_state_dict expects numbers for parameters. It casts and moves state as each optimizer needs.
        indices = {p: i for i, p in enumerate(p for group in self.optimizer.param_groups for p in group["params"])}
        owned = self._owned()
        entries: dict[int, dict[str, Any]] = {}
        for key, value in chain(((key, lazily(slots, key)) for key in slots), plain.items()):
            name, _, slot = key.rpartition("/")
            if (parameter := owned[name].parameter) is not None:
                if isinstance(value, Tensor | Whole):
                    slot, value = as_slot(parameter, slot, owned[name].cut(value)[...])
                entries.setdefault(indices[parameter], {})[slot] = value
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": entries, "param_groups": groups})


def stored_as(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """Return a copy of `value` with the parameter's strides, which torch's fused optimizers assume."""
    if value.shape != parameter.shape or parameter.is_contiguous():
        return value.clone()
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device, requires_grad=False).copy_(value)


def as_saved(key: str, value: Tensor) -> tuple[str, Tensor]:
    """Return a slot of an optimizer and its key as they are saved: a dense tensor."""
    return (key + _SPARSE, value.to_dense()) if value.is_sparse else (key, value)


def as_slot(parameter: nn.Parameter, slot: str, saved: Tensor) -> tuple[str, Tensor]:
    """Return a slot of a parameter, and its value, from what `as_saved` has returned."""
    if slot.endswith(_SPARSE):
        return slot.removesuffix(_SPARSE), saved.to_sparse(1)
    return slot, stored_as(parameter, saved)


def _split_aliases(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tied tensors once, and their other names as aliases."""
    kept: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        # This rank may hold no rows of a divided tensor; torch has memory for their padding.
        is_of_stage = on_stages(tensor) is not None
        address = local(tensor).untyped_storage().data_ptr() if is_divided(tensor) else tensor.data_ptr()
        place = (tensor.device, id(tensor) if is_of_stage else address, tensor.shape, tensor.stride(), tensor.dtype)
        if (tensor.numel() or is_of_stage) and place in seen:
            aliases[name] = seen[place]
        else:
            kept[name] = tensor
            seen[place] = name
    return kept, aliases


def _check_shapes(model: Mapping[str, Tensor], saved: Mapping[str, tuple[int, ...]]) -> None:
    ours = {name: whole_shape(tensor) for name, tensor in model.items()}
    theirs = dict(saved)
    for name, tensor in model.items():
        if is_divided(tensor) and theirs.get(name) == local(tensor).shape:  # this rank's rows
            theirs[name] = ours[name]
    if ours == theirs:
        return
    differing = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    shown = "; ".join(f"{n}: {theirs.get(n, 'missing')}" for n in differing[:3])
    raise CheckpointError(
        "the checkpoint does not match the model",
        expected="; ".join(f"{n}: {ours.get(n, 'no such tensor')}" for n in differing[:3]),
        found=f"{shown} ({len(differing)} of {len(ours.keys() | theirs.keys())} tensors differ)",
        next_step="use the model options of the run, or another --run_dir",
    )
