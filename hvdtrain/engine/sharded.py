"""Divide the optimizer's state, and the sums of gradients, among ranks that all hold the model: ZeRO-1 and ZeRO-2."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from hvdtrain.compression.table import parse
from hvdtrain.engine.among_copies import AmongCopies
from hvdtrain.engine.base import Engine
from hvdtrain.engine.coded_shards import CodedShards
from hvdtrain.engine.divisible import divides_rows, norm_of_owned, use_owned, whole_parameters
from hvdtrain.engine.layout import Layout
from hvdtrain.engine.parts import EngineParts
from hvdtrain.errors import ConfigError, TaskError
from hvdtrain.exchange.agreement import check_same_names
from hvdtrain.exchange.at_owners import AtOwners
from hvdtrain.exchange.buckets import prepare_exchange
from hvdtrain.exchange.in_order import InOrderShardBucket, Leaves
from hvdtrain.exchange.norms import squared_norm
from hvdtrain.exchange.shard_bucket import ShardBucket, Shared
from hvdtrain.plan.collectives import bucket_limit
from hvdtrain.plan.gradients import Gradient
from hvdtrain.plan.plan import Ranks
from hvdtrain.spans import Spans
from hvdtrain.state.exchange_state import Owned


class WholeModel(Layout):
    """Each rank holds the whole model, and owns rows of it.

    Args:
        exchange: of all parameters.
        name: prefix of the collectives' names.

    Errors: ConfigError: the model or the optimizer cannot be divided among the ranks.
    """

    def __init__(self, parts: EngineParts, exchange: AtOwners, name: str) -> None:
        self._optimizer, self._model, self._comm, self._name = parts.optimizer, parts.model, parts.comm, name
        self._exchange, self._names = exchange, dict[nn.Parameter, str]()
        self._groups = [list(group["params"]) for group in parts.optimizer.param_groups]
        self.parameters, self.exchanges, self.every = {}, {}, [exchange]
        self._add(parts.parameters)
        owners = {rank for owned in self.owned.values() for rank in owned.owners}
        if len(owners) < parts.comm.size and not parts.plan.elastic:
            raise ConfigError(
                "the model has too few parameters to divide its optimizer among the ranks",
                expected="a tensor for each rank, or larger tensors",
                found=f"parameters for {len(owners)} of {parts.comm.size} ranks",
                next_step="use fewer ranks, or do not divide the optimizer (shard: none)",
            )
        use_owned(self._optimizer, self._names, self.owned)

    def _add(self, named: list[tuple[str, nn.Parameter]]) -> None:
        self._exchange.add(named)
        self._names |= {parameter: name for name, parameter in named}
        self.parameters |= dict(named)
        self.held = {name: Owned(parameter) for name, parameter in self.parameters.items()}
        self.owned = self._exchange.owned()

    def find_added(self, complete: Callable[[], None]) -> bool:
        """Divide parameters that were added to the optimizer. Collective: yes.

        Errors: TaskError: one is from outside the model.
        """
        known = {owned.parameter for owned in self.owned.values()}
        added = {p for group in self._optimizer.param_groups for p in group["params"] if p not in known}
        if not added:
            return False
        complete()
        named = [(name, p) for name, p in self._model.named_parameters() if p in added]
        if len(named) < len(added):
            raise TaskError(
                "a parameter was added to the optimizer that is not one of the model",
                expected="parameters of the model, because the optimizer is divided among ranks",
                next_step="add it to the model, too; in your own loop, make the optimizer of all parameters",
            )
        for group, before in zip(self._optimizer.param_groups, self._groups, strict=False):
            before += [p for p in group["params"] if p in added]
        self._groups += [list(group["params"]) for group in self._optimizer.param_groups[len(self._groups) :]]
        self._add(named)
        use_owned(self._optimizer, self._names, self.owned)
        return True

    def use_trained(self) -> None:
        """Exchange what is trained now. Collective: yes. Errors: LaunchError: the ranks train different parameters."""
        self.exchanges = {n: self._exchange for n, p in self.parameters.items() if p.requires_grad and p.numel()}
        names = [name for name, parameter in self.parameters.items() if parameter.requires_grad]
        check_same_names(self._comm, names, name=f"{self._name}/trained")

    def trained_names(self) -> list[str]:
        """Return the names of all trained parameters with elements."""
        return list(self.exchanges)

    def leads(self, name: str) -> bool:  # noqa: D102
        return self._comm.rank == 0 and name in self.exchanges

    def norm(self, gradients: list[Tensor]) -> Tensor:  # noqa: D102
        squared = squared_norm(gradients, self._exchange.shapes())
        return norm_of_owned(squared, self._comm, self._model, self._name)

    def close(self) -> None:
        """Give the optimizer the model's parameters again, without their state."""
        for group, parameters in zip(self._optimizer.param_groups, self._groups, strict=True):
            group["params"] = parameters
        for owned in self.owned.values():
            if owned.parameter is not None:
                self._optimizer.state.pop(owned.parameter, None)


def make_sharded(parts: EngineParts, *, weight: float = 1.0, name: str = "gradients") -> Engine:
    """Make the engine. In an elastic job, ranks may own nothing, because there are many, or everything.

    Args:
        parts: of the engine.
        weight: applied to each gradient before the exchange.
        name: prefix of the collectives' names.

    Errors: ConfigError: the model is too small to be divided.
    """
    plan = parts.plan
    compression = parse(plan.compression)
    prepare_exchange(compression, parts.comm, parts.variables)
    trained = [(name, p) for name, p in parts.parameters if p.requires_grad]
    whole = whole_parameters(parts.optimizer, [p for _, p in trained])
    gradients = [
        Gradient(name, tuple(p.shape), str(p.dtype).removeprefix("torch."), whole=each)
        for (name, p), each in zip(trained, whole, strict=True)
    ]
    ranks = Ranks(parts.comm.size, parts.comm.local_size)
    # Gradients and updates are sent encoded then.
    coded = None if compression.exact else CodedShards(compression, parts.comm)
    leaves = Leaves(parts.comm, in_turn=plan.sums_each_pass) if plan.bits else None
    make: Callable[[Shared], ShardBucket] = ShardBucket if coded is None else coded.make_bucket
    if leaves is not None:
        make = partial(InOrderShardBucket, leaves=leaves, each_pass=plan.sums_each_pass)
    exchange = AtOwners(
        parts.comm,
        bucket_limit(plan, gradients, ranks, compression),
        parts.spans or Spans(),
        name,
        partial(whole_parameters, parts.optimizer),
        make,
        weight=weight,
        limited=plan.balance != "speed",  # else a rank would wait for others in its backward passes
        on_host=plan.offload,
        by_rows=plan.bits or not divides_rows(parts.optimizer),  # with bits, the norm has a square for each row
    )
    sums = AmongCopies(parts, WholeModel(parts, exchange, name), coded=coded, name=name, weight=weight, leaves=leaves)
    return Engine(parts.optimizer, sums)
