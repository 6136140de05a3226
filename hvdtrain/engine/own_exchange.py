"""The exchange of a divided optimizer in a user's own loop, and its state in the format of the undivided one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.comm.objects import allgather_json, broadcast_json
from hvdtrain.engine.own_loop import DividedReducer
from hvdtrain.errors import CallOrderError, CheckpointError, TaskError
from hvdtrain.exchange.own_loop import Exchange
from hvdtrain.state.pieces import StateDict
from hvdtrain.state.train_state import NUMBERS, Progress, TrainState, stored_as
from hvdtrain.state.transfer import gather_pieces


class DividedExchange(Exchange):
    """The exchange of an optimizer that is divided among ranks.

    Args:
        model: has the optimizer's parameters.
        groups: of the undivided optimizer: the names of the parameters in each.
    """

    reducer: DividedReducer

    def __init__(
        self, reducer: DividedReducer, model: nn.Module, groups: list[list[str]], session: Callable[[], int]
    ) -> None:
        self._model, self._groups = model, groups
        self.loads = 0
        super().__init__(reducer, lambda: (reducer.comm, 1.0, 1.0), session)

    def synchronize(self) -> None:
        """Sum the gradients at their owners, once a step. Collective: yes."""
        self._leave_out_cleared()
        self._refuse_second_sum()
        super().synchronize()

    def clip(self, optimizer: Optimizer, max_norm: float) -> Tensor:
        """Sum the gradients, and clip what this rank has of the sums by the norm of all. Collective: yes."""
        self._leave_out_cleared()
        return super().clip(optimizer, max_norm)

    def _leave_out_cleared(self) -> None:
        """Drop the sums of a step that the program left out: a rank without batches starts the next one here."""
        if self.reducer.cleared:
            self.clear()

    def _refuse_second_sum(self) -> None:
        if self.reducer.over:
            raise CallOrderError(
                "the gradients of this step were summed before, and their owners have the sums",
                expected="one synchronize() a step, then step() within optimizer.skip_synchronize()",
                next_step="optimizer.clip_grad_norm_(max_norm) needs no synchronize()",
            )

    def step(self, update: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
        """Sum the gradients, update what this rank owns, and wait until all ranks have the new parameters."""
        if self._synchronized and not self._skip:
            self._refuse_second_sum()
        return super().step(update, closure)

    def _step_with(self, update: Callable[..., Any], closure: Callable[[], Any]) -> Any:
        """Call the closure once, before the update."""
        with torch.enable_grad():
            loss = closure()
        self.step(update, None)
        return self._total(loss)

    def _update(self, update: Callable[..., Any]) -> Any:
        if not self.reducer.over:
            raise CallOrderError(
                "step() within skip_synchronize() has no sums of gradients to use",
                next_step="call optimizer.synchronize() or optimizer.clip_grad_norm_(max_norm) before, on every rank",
            )
        return self.reducer.update(update)

    def zero_grad(self, own: Callable[..., None], set_to_none: bool = True) -> None:
        """Drop the current step, and clear the gradients of the model."""
        self.clear()
        self.reducer.zero_grad(set_to_none=set_to_none)

    def unscale(self, own: Callable[[], dict[torch.device, Tensor]]) -> dict[torch.device, Tensor]:
        """Sum the gradients and let a GradScaler divide them; an overflow on one rank is one for all."""
        self._leave_out_cleared()
        self.sum_up()
        with self.reducer.exposed():
            found = own()
        return {self.reducer.device: self.reducer.overflow(list(found.values()))}

    def _gradients(self, optimizer: Optimizer) -> list[Tensor]:
        return self.reducer.sums()

    def _norm(self, gradients: list[Tensor]) -> Tensor:
        return self.reducer.engine.norm(gradients).reshape(())

    def state_dict(self, own: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Refuse. Errors: TaskError."""
        raise TaskError(
            "this rank has only a part of the optimizer's state, because the optimizer is divided among ranks",
            next_step="call optimizer.gather_state_dict() on every rank; rank 0 gets the whole state. Elastic states,"
            ' such as hvd.elastic.TorchState, need shard="none"',
        )

    def gather_state_dict(self, own: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the whole state on rank 0, as that of the undivided optimizer, and {} on others. Collective: yes."""
        self.reducer.synchronize_state()
        engine = self.reducer.engine
        scaler = torch.amp.GradScaler(enabled=False)
        held = TrainState(self._model, engine.optimizer, scaler, Progress(), engine).state_dict()
        kinds = ("optimizer", NUMBERS)
        tensors = {kind: held.tensors[kind] for kind in kinds if kind in held.tensors}
        places = {key: place for key, place in held.places.items() if key[0] in kinds}
        whole = gather_pieces(StateDict(tensors, {}, places), self.reducer.comm)
        if self.reducer.comm.rank != 0:
            return {}
        parameters = dict(self._model.named_parameters())
        state: dict[str, dict[str, Any]] = {}
        for kind in tensors.keys() | whole.tensors.keys():
            for key, value in whole.tensors[kind].items():
                name, _, slot = key.rpartition("/")
                stored = value.item() if kind == NUMBERS else stored_as(parameters[name], value)
                state.setdefault(name, {})[slot] = stored
        indices = {name: index for index, name in enumerate(name for names in self._groups for name in names)}
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": [indices[name] for name in names]}
            for group, names in zip(engine.optimizer.param_groups, self._groups, strict=True)
        ]
        return {"state": {i: state[name] for name, i in indices.items() if name in state}, "param_groups": groups}

    def load_state_dict(self, own: Callable[[dict[str, Any]], None], state: dict[str, Any]) -> None:
        """Load this rank's part of a whole state, and drop the current step.

        Errors: CheckpointError: it is the state of other groups of parameters.
        """
        saved: list[Mapping[str, Any]] = state.get("param_groups", [])
        if [len(group["params"]) for group in saved] != list(map(len, self._groups)):
            raise CheckpointError(
                "the state is that of an optimizer with other parameters",
                expected=f"groups of {', '.join(str(len(names)) for names in self._groups)} parameters",
                found=f"groups of {', '.join(str(len(group['params'])) for group in saved)} parameters",
                next_step="load the state that optimizer.gather_state_dict() returned on rank 0, on every rank",
            )
        name_of = {
            n: name
            for group, names in zip(saved, self._groups, strict=True)
            for n, name in zip(group["params"], names, strict=True)
        }
        groups = self.reducer.engine.optimizer.param_groups
        numbers = {p: i for i, p in enumerate(p for group in groups for p in group["params"])}
        entries: dict[int, dict[str, Any]] = {}
        owned = self.reducer.engine.owned() or {}
        for number, slots in state["state"].items():
            part = owned.get(name_of[number])  # none of a parameter without elements
            if part is not None and part.parameter is not None:
                entries[numbers[part.parameter]] = {
                    slot: stored_as(part.parameter, part.cut(value)) if isinstance(value, Tensor) else value
                    for slot, value in slots.items()
                }
        options = [
            {**old, "params": [numbers[p] for p in group["params"]]} for old, group in zip(saved, groups, strict=True)
        ]
        self.loads += 1
        super().load_state_dict(own, {"state": entries, "param_groups": options})

    def broadcast_options(self, root: int) -> None:
        """Copy the options of the groups, such as the learning rate, from rank `root` to all. Collective: yes.

        Errors: TaskError: the ranks have not loaded equally many states; on every rank.
        """
        loads = allgather_json(self.reducer.comm, self.loads, name="optimizer/loads")
        if len(set(loads)) > 1:
            raise TaskError(
                "a state of the optimizer was loaded on some ranks only, and none of them has kept all of it",
                expected="optimizer.load_state_dict(state) on every rank, because the optimizer is divided",
                found=", ".join(f"{count} on rank {rank}" for rank, count in enumerate(loads)),
                next_step="read the checkpoint on every rank, or send it: hvd.broadcast_object(state, root_rank=0)",
                everywhere=True,
            )
        groups = self.reducer.engine.optimizer.param_groups
        own = [
            {k: v.item() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"} for group in groups
        ]
        sent = broadcast_json(self.reducer.comm, own, name="optimizer/options", root=root)
        for group, values in zip(groups, sent, strict=True):
            for option, value in values.items():
                if isinstance(held := group[option], Tensor):
                    held.fill_(value)
                else:
                    group[option] = tuple(value) if isinstance(held, tuple) else value

    def add_param_group(self, own: Callable[[dict[str, Any]], None], group: dict[str, Any]) -> None:
        """Refuse. Errors: TaskError."""
        raise TaskError(
            "parameters cannot be added to an optimizer that is divided among ranks",
            next_step="add them before DistributedOptimizer, frozen until they are trained: requires_grad_(False)",
        )
