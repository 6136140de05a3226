"""The engine of ranks that divide matrices or experts: transformers' plans, and our exchange between copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from hvdtrain.comm.mesh import comm_among, gather_hosts
from hvdtrain.comm.objects import allgather_json, on_rank_0
from hvdtrain.comm.torch_order import is_lost_rank, lost_rank
from hvdtrain.engine.base import Loss
from hvdtrain.engine.divisible import (
    DividedEngine,
    norm_of_parts,
    own_rows,
    refuse_what_cannot_be_divided,
    updates_by_element,
    use_owned,
    whole_parameters,
)
from hvdtrain.engine.division import divide_model
from hvdtrain.engine.fsdp_checks import check_mesh
from hvdtrain.engine.parts import EngineParts
from hvdtrain.engine.schedule import Passes, PipelineSchedule, Schedule
from hvdtrain.engine.stage import Stage
from hvdtrain.engine.token_exchange import by_nccl_of_horovod
from hvdtrain.errors import ConfigError, HvdtrainError, TaskError
from hvdtrain.exchange.between_copies import BetweenCopies
from hvdtrain.exchange.divided_copies import DividedCopies
from hvdtrain.exchange.preparation import prepare_exchange, resolve_compression
from hvdtrain.spans import Spans
from hvdtrain.state.divided import cuts, is_divided, local, on_stages, share_count
from hvdtrain.state.exchange_state import Owned
from hvdtrain.state.pieces import Place

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class MeshEngine(DividedEngine):
    """Ranks divide the matrices or the experts of a model; other ranks have copies of each part, with other samples.

    Plans of transformers place DTensors in the model, and exchange activations in each pass. The optimizer has this
    rank's parts as plain tensors. In the last backward pass of a step, the gradients of each part are summed over its
    copies, in buckets. With `--parallel.shard optimizer`, each copy updates some rows of the part, and sends them to
    the others; with `gradients`, the sums of each pass are at their owners.

    Args:
        parts: the model's parameters become those of rank 0.
        place: gives each rank its part of them; returns the names of those with a part of the gradient.
        schedule: the order of passes.

    Attributes:
        stage: of this rank in a pipeline; None without.
    """

    uniform_passes = True

    def __init__(
        self,
        parts: EngineParts,
        place: Callable[[EngineParts, list[Any]], set[str]] = divide_model,
        schedule: Schedule | None = None,
    ) -> None:
        super().__init__(parts.optimizer, parts.model, parts.comm)
        self._schedule = schedule or Schedule()
        self.stage = self._schedule.stage
        self.compression, self._options = parts.plan.compression, parts.plan.dimensions.options
        names = {parameter: name for name, parameter in parts.parameters}
        self._names = [name for name, parameter in parts.parameters if parameter.requires_grad]
        hosts = gather_hosts(parts.comm)
        self._partial = place(parts, hosts)
        self._parameters = {name: p for name, p in parts.model.named_parameters() if name in set(names.values())}
        self._held = {name: own_rows(p) if is_divided(p) else Owned(p) for name, p in self._parameters.items()}
        self._owned = self._held
        use_owned(parts.optimizer, names, self._owned)
        self._trained = self._which_are_trained()
        self._leads: dict[str, bool] = {}  # whether this rank is the first of those with copies of a parameter
        self._copies = self._make_exchanges(parts, hosts)
        self._copies_of = {name: each for names, each in self._copies for name in names}
        self._divided = [each for _, each in self._copies if isinstance(each, DividedCopies)]
        self._sums_each_pass = parts.plan.shard == "gradients"
        if parts.plan.shard != "none":
            self._divide_optimizer(parts)
        # While torch exchanges activations in backward, NCCL of Horovod might wait for it on one rank, and it for that
        # on another.
        waits = parts.plan.dimensions.tp > 1 or parts.plan.dimensions.pp > 1  # else tokens go by Horovod, too
        self._overlaps = not waits or not by_nccl_of_horovod(parts.comm, parts.device)
        self._missing: set[str] = set()  # parameters without a gradient in this step
        self._owed: set[str] = set()  # those with a residual that this step has not delivered yet
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, name))  # type: ignore[no-untyped-call]
            for name, parameter in self._parameters.items()
            if parameter.requires_grad
        ]

    def _make_exchanges(self, parts: EngineParts, hosts: list[Any]) -> list[tuple[list[str], _Copies | None]]:
        """Return the names of the parameters that have the same copies, with their exchange; None without copies.

        Collective: yes.
        """
        dimensions, comm = parts.plan.dimensions, parts.comm
        compression = resolve_compression(parts.plan.compression, parts.device, parts.variables)
        limit = prepare_exchange(compression, comm, parts.variables, parts.plan.bucket_mib)
        found: list[tuple[list[str], _Copies | None]] = []
        kinds = {name: self._kind(name, parameter, dimensions.tp) for name, parameter in self._parameters.items()}
        copies = partial(dimensions.copies, comm.rank, comm.size)
        for kind, width, ranks in (
            ("gradients", dimensions.tp, copies(dimensions.tp)),
            ("experts", dimensions.experts, copies(dimensions.experts)),
            ("partial", 1, copies(1)),
            ("ends", dimensions.tp, dimensions.ends(comm.rank, comm.size)),
        ):
            # Backward finishes the gradients of the last modules first.
            held = [
                (name, rows)
                for name, parameter in reversed(self._parameters.items())
                if parameter.requires_grad and (rows := self._held[name].parameter) is not None and kinds[name] == kind
            ]
            self._leads |= {name: comm.rank == ranks[0] for name, _ in held}
            among = None
            if len(ranks) > 1 and held:
                among = comm_among(comm, ranks, hosts)
            spans = parts.spans or Spans()
            if among is None or parts.plan.shard == "none":
                exchange = None if among is None else BetweenCopies(held, among, compression, limit, spans, kind)
                found.append(([name for name, _ in held], exchange))
                continue
            # What neighbours have whole is in buckets of its own, so that they own the same rows of it.
            alike = [each for each in held if _width(self._parameters[each[0]]) < width]
            apart = [each for each in held if _width(self._parameters[each[0]]) >= width]
            for named, name in ((apart, kind), (alike, f"{kind}/alike")):
                whole = whole_parameters(parts.optimizer, [parameter for _, parameter in named])
                found.append(([each for each, _ in named], DividedCopies(named, whole, among, limit, spans, name)))
        return found

    def _kind(self, name: str, parameter: nn.Parameter, tp: int) -> str:
        """Return which exchange a parameter is in, by the ranks that have copies of it, or of this rank's part."""
        if (place := on_stages(parameter)) is not None and len(place.stages) > 1:
            return "ends"
        if name in self._partial:
            return "partial"
        return "experts" if _width(parameter) > tp else "gradients"

    def _divide_optimizer(self, parts: EngineParts) -> None:
        """Let the optimizer have this rank's rows of what several ranks hold. Collective: yes.

        Errors:
            ConfigError: no rank has a copy of what another one holds; on every rank.
        """
        dimensions, comm = parts.plan.dimensions, parts.comm
        shares = {name: share for exchange in self._divided for name, share in exchange.owned().items()}
        own = {name: share.parameter is not None for name, share in shares.items()}
        everyone = allgather_json(comm, own, name="owners")
        if not any(everyone):
            raise ConfigError(
                f"--parallel.shard optimizer with {dimensions.options} divides the optimizer among copies of each part",
                expected="more ranks, so that parts have copies",
                found=f"{comm.size} ranks, which hold one of each",
                next_step="leave out --parallel.shard, or start more ranks",
                everywhere=True,
            )
        names: dict[nn.Parameter, str] = {}
        owned = dict(self._held)
        for name, share in shares.items():
            held, parameter, place = self._held[name], self._parameters[name], None
            assert held.parameter is not None
            names[held.parameter] = name
            if share.place is not None:
                whole = held.place or Place(tuple(parameter.shape), (0,) * parameter.dim(), ())
                offset = tuple(a + b for a, b in zip(whole.offset, share.place.offset, strict=True))
                is_alike = _width(parameter) == 1 and name not in self._partial
                ranks = dimensions.block(comm.rank, dimensions.tp) if is_alike else [comm.rank]
                place = Place(whole.shape, offset, tuple(ranks))
            owned[name] = Owned(share.parameter, place)
        for name in {name for each in everyone for name in each}:
            owners = tuple(rank for rank, each in enumerate(everyone) if each.get(name))
            owned[name] = replace(owned[name], owners=owners)
        self._owned = owned
        use_owned(parts.optimizer, names, shares)  # by their places in what this rank holds, as its state is

    def step(self) -> None:
        """Update what this rank's optimizer has; other copies get it. Collective: yes, with a divided optimizer."""
        super().step()
        if self._divided:
            self.optimizer.zero_grad()  # what is sent takes their memory
        for exchange in self._divided:
            exchange.spread()

    def begin(self, micro_batches: int) -> None:
        """Clear gradients; all ranks have the same number of passes."""
        if self._which_are_trained() != self._trained:
            raise TaskError(
                "parameters were frozen or freed during training, which ranks that divide a model do not support",
                expected="the same trained parameters in every step",
                next_step=f"leave out {self._options}",
            )
        self._model.zero_grad()
        self.optimizer.zero_grad()
        self._schedule.begin(micro_batches)
        self._missing = set(self._copies_of)
        self._owed = {name for name in self._undelivered.sums if self._leads.get(name)}
        for _, exchange in self._copies:
            if exchange is not None:
                exchange.begin()

    def forward(self, call: Callable[[], Loss]) -> Loss:
        """Run a forward pass of a step. Collective: yes."""
        self._schedule.forward(call)
        try:
            return call()
        except RuntimeError as error:
            raise _explained(error) from error

    def accumulate(self, passes: Passes) -> None:
        """Run the passes of a step. Collective: yes."""
        self._schedule.run(passes, self._pass_back)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`; in the last pass, begin to sum them over copies. Collective: yes."""
        self._pass_back(self._schedule.backward(loss))

    def _pass_back(self, call: Callable[[], None]) -> None:
        if self._sums_each_pass and self._schedule.begun:
            self._end_pass()
        self._schedule.count()
        try:
            call()
        except RuntimeError as error:
            raise _explained(error) from error

    def _on_gradient(self, name: str, parameter: nn.Parameter) -> None:
        is_last = not self._schedule.left or (self._sums_each_pass and self._copies_of[name] is not None)
        if is_last and self._overlaps and not self._schedule.awaits(parameter):
            self._hand_over(name, parameter)

    def _hand_over(self, name: str, parameter: nn.Parameter) -> None:
        """Give the gradient of all passes to the optimizer's part of a parameter, and begin its exchange.

        On one copy, add what an earlier exchange with a compression has not delivered.
        """
        self._missing.discard(name)
        rows = self._held[name].parameter
        assert rows is not None
        if rows is not parameter and parameter.grad is not None:
            gradient: Tensor = parameter.grad
            if on_stages(parameter) is None:
                # torch may leave the gradient of a divided matrix whole, or a part of a sum.
                placements = cast("DTensor", parameter).placements
                gradient = cast("DTensor", gradient).redistribute(placements=placements)
            rows.grad, parameter.grad = local(gradient), None
        if name in self._owed:
            self._owed.discard(name)
            rows.grad = torch.zeros_like(rows) if rows.grad is None else rows.grad
            rows.grad += self._held[name].cut(self._undelivered.sums[name]).to(rows)
        if (exchange := self._copies_of[name]) is not None:
            exchange.add_gradient(name)

    def _end_pass(self) -> None:
        """Wait for the sums of a pass at their owners, and begin the next one. Collective: yes."""
        for name, exchange in self._copies_of.items():
            if exchange is not None and not self._overlaps and self._parameters[name].grad is not None:
                self._hand_over(name, self._parameters[name])
        for each in self._divided:
            each.end_pass()

    def finish(self) -> list[Tensor]:
        """Wait for the sums of what this rank holds. Collective: yes."""
        for name, exchange in self._copies_of.items():  # those that the last pass has not used
            parameter = self._parameters[name]
            waits = name in self._missing or (self._sums_each_pass and exchange is not None and not self._overlaps)
            if (waits and parameter.grad is not None) or name in self._owed:
                self._hand_over(name, parameter)
        gradients = []
        for names, exchange in self._copies:
            if exchange is not None:
                gradients += exchange.finish()
                continue
            for name in names:
                rows = self._held[name].parameter
                assert rows is not None
                rows.grad = torch.zeros_like(rows) if rows.grad is None else rows.grad
                gradients.append(rows.grad)
        return gradients

    def unused(self) -> list[bool]:
        """Return for each trained parameter whether this rank has none of it, or has not used it."""
        return [not self._has_gradient(name) for name in self._names]

    def _has_gradient(self, name: str) -> bool:
        held = name in self._copies_of
        return held and (name not in self._missing or self._parameters[name].grad is not None)

    def _trained_names(self) -> list[str]:
        return self._names

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the norm of the whole gradient. Collective: yes."""
        return norm_of_parts(self._owned, self._comm, self._model)

    def _which_are_trained(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._parameters.values()]

    def parameters_by_collective(self) -> dict[str, list[str]]:
        """Return the names of the parameters in each bucket."""
        found: dict[str, list[str]] = {}
        for _, exchange in self._copies:
            if exchange is not None:
                found |= exchange.parameter_names()
        return found

    def copies(self) -> dict[str, int]:
        """Return how many ranks sum the gradient of each parameter."""
        return {name: 1 if each is None else each.ranks for name, each in self._copies_of.items()}

    def buffers(self) -> list[Tensor]:
        """Return the buckets."""
        return [buffer for _, exchange in self._copies if exchange is not None for buffer in exchange.buffers()]

    def close(self) -> None:
        """Remove the hooks."""
        self._schedule.close()
        for hook in self._hooks:
            hook.remove()


_Copies = BetweenCopies | DividedCopies
"""What exchanges the gradients of a part between its copies."""


def _width(parameter: nn.Parameter) -> int:
    """Return how many ranks of a stage divide a parameter."""
    is_whole = on_stages(parameter) is not None or not is_divided(parameter)
    return 1 if is_whole else share_count(cuts(parameter))


def _explained(error: RuntimeError) -> RuntimeError | HvdtrainError:
    return lost_rank(error, "an exchange of activations") if is_lost_rank(error) else error


def make_mesh_engine(parts: EngineParts) -> MeshEngine:
    """Make the engine. Collective: yes.

    Errors:
        ConfigError: the ranks, the model or the optimizer cannot be divided.
    """
    check_mesh(parts)
    check = partial(
        refuse_what_cannot_be_divided, parts.model, parts.parameters, f"leave out {parts.plan.dimensions.options}"
    )
    on_rank_0(parts.comm, check, name="divisible")  # others may have placeholders
    by_expert = parts.plan.dimensions.tp == 1 and not any(
        whole
        for (_, p), whole in zip(
            parts.parameters, whole_parameters(parts.optimizer, [p for _, p in parts.parameters]), strict=True
        )
        if p.dim() > 2
    )
    if not (updates_by_element(parts.optimizer) or by_expert or parts.plan.dimensions.experts == 1):
        raise ConfigError(
            f"{parts.plan.dimensions.options} gives each rank parts of matrices, but the optimizer may need whole ones",
            expected="an optimizer of torch.optim that updates each element by itself, such as adamw; for"
            " --parallel.ep also muon",
            found=f"{type(parts.optimizer).__module__}.{type(parts.optimizer).__qualname__}",
            next_step=f"another --optimizer.name, updates_by_element = True in the class of your own optimizer that"
            f" does, or leave out {parts.plan.dimensions.options}",
        )
    if parts.plan.dimensions.pp > 1:
        spans = parts.spans or Spans()
        stage = Stage(parts.model, parts.comm, parts.plan.dimensions, parts.device, spans)
        return MeshEngine(parts, stage.place, PipelineSchedule(stage, spans))
    return MeshEngine(parts)
