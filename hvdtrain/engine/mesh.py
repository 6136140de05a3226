"""Ranks divide the matrices or the experts of a model, or its layers; other ranks have copies of each part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from hvdtrain.comm.mesh import comm_among, gather_hosts
from hvdtrain.comm.objects import allgather_json
from hvdtrain.engine.among_copies import AmongCopies
from hvdtrain.engine.base import Engine
from hvdtrain.engine.divisible import divides_rows, norm_of_parts, own_rows, use_owned, whole_parameters
from hvdtrain.engine.division import divide_model
from hvdtrain.engine.layout import Exchange, Layout
from hvdtrain.engine.parts import EngineParts
from hvdtrain.engine.schedule import PipelineSchedule
from hvdtrain.engine.stage import Stage
from hvdtrain.engine.token_exchange import by_nccl_of_horovod
from hvdtrain.errors import ConfigError, TaskError
from hvdtrain.exchange.active_buckets import BetweenCopies
from hvdtrain.exchange.at_owners import AtOwners
from hvdtrain.exchange.buckets import prepare_exchange, resolve_compression
from hvdtrain.spans import Spans
from hvdtrain.state.divided import cuts, is_divided, on_stages, share_count
from hvdtrain.state.exchange_state import Owned
from hvdtrain.state.pieces import Place


class Cuts(Layout):
    """Each rank holds cuts of matrices, experts or layers, and copies of the rest.

    Plans of transformers place DTensors in the model, and exchange activations in each pass. The optimizer has this
    rank's parts as plain tensors. The gradients of each part are summed over its copies. With `--parallel.shard
    optimizer` or `gradients`, each copy owns some rows of the part.

    Args:
        parts: the model's parameters become those of rank 0.
        place: gives each rank its part of them; returns the names of those with a part of the gradient.
    """

    divides_model = True

    def __init__(self, parts: EngineParts, place: Callable[[EngineParts, list[Any]], set[str]] = divide_model) -> None:
        self._model, self._comm, self._options = parts.model, parts.comm, parts.plan.dimensions.options
        names = {parameter: name for name, parameter in parts.parameters}
        self._names = [name for name, parameter in parts.parameters if parameter.requires_grad]
        hosts = gather_hosts(parts.comm)
        self._partial = place(parts, hosts)
        self.parameters = {name: p for name, p in parts.model.named_parameters() if name in set(names.values())}
        self._trained = [parameter.requires_grad for parameter in self.parameters.values()]
        self.held = {name: own_rows(p) if is_divided(p) else Owned(p) for name, p in self.parameters.items()}
        self.owned = self.held
        self._optimizer = parts.optimizer
        use_owned(parts.optimizer, names, self.owned)
        self._leads: dict[str, bool] = {}  # whether this rank is the first of those with copies of a parameter
        self.exchanges = self._make_exchanges(parts, hosts)
        self.every = list(dict.fromkeys(each for each in self.exchanges.values() if each is not None))
        if parts.plan.shard != "none":
            self._divide_optimizer(parts)
        self._optimized = sum(len(group["params"]) for group in parts.optimizer.param_groups)

    def _make_exchanges(self, parts: EngineParts, hosts: list[Any]) -> dict[str, Exchange | None]:
        """Return the exchange of each trained parameter: one for those with the same copies. Collective: yes."""
        found: dict[str, Exchange | None] = {}
        dimensions, comm, spans = parts.plan.dimensions, parts.comm, parts.spans or Spans()
        compression = resolve_compression(parts.plan.compression, parts.device, parts.variables)
        limit = prepare_exchange(compression, comm, parts.variables, parts.plan.bucket_mib)
        kinds = {name: self._kind(name, parameter, dimensions.tp) for name, parameter in self.parameters.items()}
        copies = partial(dimensions.copies, comm.rank, comm.size)
        whole = partial(whole_parameters, parts.optimizer)
        for kind, width, ranks in (
            ("gradients", dimensions.tp, copies(dimensions.tp)),
            ("experts", dimensions.experts, copies(dimensions.experts)),
            ("partial", 1, copies(1)),
            ("ends", dimensions.tp, dimensions.ends(comm.rank, comm.size)),
        ):
            held = [
                (name, rows)
                for name, parameter in self.parameters.items()
                if parameter.requires_grad and (rows := self.held[name].parameter) is not None and kinds[name] == kind
            ]
            self._leads |= {name: comm.rank == ranks[0] for name, _ in held}
            among = comm_among(comm, ranks, hosts) if len(ranks) > 1 and held else None
            if among is None:
                found |= dict.fromkeys([name for name, _ in held])
                continue
            if parts.plan.shard == "none":
                ordered = held[::-1]  # backward finishes the gradients of the last modules first
                between: Exchange = BetweenCopies(ordered, among, compression, limit, spans, kind)
                found |= dict.fromkeys([name for name, _ in held], between)
                continue
            # What neighbours have whole is in buckets of its own, so that they own the same rows of it.
            alike = [each for each in held if _width(self.parameters[each[0]]) < width]
            apart = [each for each in held if _width(self.parameters[each[0]]) >= width]
            for named, name in ((apart, kind), (alike, f"{kind}/alike")):
                by_rows = not divides_rows(parts.optimizer)
                owners = AtOwners(among, limit, spans, name, whole, on_host=parts.plan.offload, by_rows=by_rows)
                owners.add(named)
                found |= dict.fromkeys([each for each, _ in named], owners)
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

        Errors: ConfigError: no rank has a copy of what another one holds; on every rank.
        """
        dimensions, comm = parts.plan.dimensions, parts.comm
        divided = [each for each in self.every if isinstance(each, AtOwners)]
        shares = {name: share for exchange in divided for name, share in exchange.owned().items()}
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
        owned = dict(self.held)
        for name, share in shares.items():
            held, parameter, place = self.held[name], self.parameters[name], None
            assert held.parameter is not None
            names[held.parameter] = name
            if share.place is not None:
                whole = held.place or Place(tuple(parameter.shape), (0,) * parameter.dim(), ())
                offset = tuple(a + b for a, b in zip(whole.offset, share.place.offset, strict=True))
                is_alike = _width(parameter) == 1 and name not in self._partial
                ranks = dimensions.block(comm.rank, dimensions.tp) if is_alike else [comm.rank]
                place = replace(share.place, shape=whole.shape, offset=offset, ranks=tuple(ranks))
            owned[name] = Owned(share.parameter, place)
        for name in {name for each in everyone for name in each}:
            owners = tuple(rank for rank, each in enumerate(everyone) if each.get(name))
            owned[name] = replace(owned[name], owners=owners)
        self.owned = owned
        use_owned(parts.optimizer, names, shares)  # by their places in what this rank holds, as its state is

    def find_added(self, complete: Callable[[], None]) -> bool:
        """Refuse parameters that were added to the optimizer. Errors: TaskError."""
        if sum(len(group["params"]) for group in self._optimizer.param_groups) != self._optimized:
            raise TaskError(
                "parameters were added to the optimizer, which ranks that divide a model do not support",
                expected="the same parameters in every step",
                next_step=f"add them before training; or leave out {self._options}",
            )
        return False

    def use_trained(self) -> None:
        """Check that the trained parameters are those of the start. Errors: TaskError: they are not."""
        trained = [parameter.requires_grad for parameter in self.parameters.values()]
        if trained != self._trained:
            raise TaskError(
                "parameters were frozen or freed during training, which ranks that divide a model do not support",
                expected="the same trained parameters in every step",
                next_step=f"leave out {self._options}",
            )

    def trained_names(self) -> list[str]:
        """Return the names of all trained parameters; this rank may have none of some."""
        return self._names

    def leads(self, name: str) -> bool:  # noqa: D102
        return self._leads.get(name, False)

    def norm(self, gradients: list[Tensor]) -> Tensor:  # noqa: D102
        return norm_of_parts(self.owned, self._comm, self._model)

    def copies(self) -> Mapping[str, int]:  # noqa: D102
        return {name: 1 if each is None else each.ranks for name, each in self.exchanges.items()}


def _width(parameter: nn.Parameter) -> int:
    """Return how many ranks of a stage divide a parameter."""
    is_whole = on_stages(parameter) is not None or not is_divided(parameter)
    return 1 if is_whole else share_count(cuts(parameter))


def make_mesh_engine(parts: EngineParts) -> Engine:
    """Make the engine. Collective: yes.

    Errors: ConfigError: the model or the optimizer cannot be divided.
    """
    # While torch exchanges activations in backward, NCCL of Horovod might wait for it on one rank, and it for that on
    # another.
    waits = parts.plan.dimensions.tp > 1 or parts.plan.dimensions.pp > 1  # else tokens go by Horovod, too
    overlaps = not waits or not by_nccl_of_horovod(parts.comm, parts.device)
    if parts.plan.dimensions.pp == 1:
        return Engine(parts.optimizer, AmongCopies(parts, Cuts(parts), overlaps=overlaps))
    stage = Stage(parts.model, parts.comm, parts.plan.dimensions, parts.device, parts.spans)
    sums = AmongCopies(parts, Cuts(parts, stage.place), overlaps=overlaps)
    return Engine(parts.optimizer, sums, PipelineSchedule(stage))
