"""Divide the optimizer of a user's own loop among ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import allgather_json
from hvdtrain.compression.table import parse
from hvdtrain.engine.make import check_same
from hvdtrain.engine.own_exchange import DividedExchange
from hvdtrain.engine.own_loop import DividedReducer
from hvdtrain.engine.parts import EngineParts
from hvdtrain.engine.refusals import refuse
from hvdtrain.engine.sharded import make_sharded
from hvdtrain.errors import ConfigError
from hvdtrain.plan.plan import Plan
from hvdtrain.plan.refusals import compressions

SHARDS = ("none", "optimizer", "gradients")
"""What `DistributedOptimizer` can divide among ranks."""


class Parameters(nn.Module):
    """A module that has parameters, by names with dots, and does nothing."""

    def __init__(self, named: list[tuple[str, nn.Parameter]]) -> None:
        super().__init__()
        self._parameters = dict(named)


def divide_optimizer(
    optimizer: Optimizer,
    named: list[tuple[str, nn.Parameter]],
    comm: Comm,
    compression: str,
    session: Callable[[], int],
    *,
    shard: str,
    variables: Mapping[str, str],
    weight: float,
    factor: float,
    passes: int,
    name: str,
) -> DividedExchange:
    """Let the optimizer's groups contain what this rank owns, and return the exchange. Collective: yes.

    Errors:
        ConfigError: the compression, the optimizer or the parameters cannot be divided among these ranks.
        LaunchError: the ranks have different parameters, or different state of the optimizer.
    """
    _check(optimizer, comm, compression, shard)
    model = Parameters(named)
    check_same(model, optimizer, comm)
    names: dict[Tensor, str] = {parameter: name for name, parameter in named}
    held = sorted(f"{names[p]}/{slot}" for p, slots in optimizer.state.items() for slot in slots)
    if len({tuple(other) for other in allgather_json(comm, held, name="optimizer/state")}) > 1:
        raise ConfigError(
            "the optimizer has other state on some ranks, and shard divides it among ranks",
            expected="the same state on every rank, or none",
            next_step="call optimizer.load_state_dict(state) on every rank",
        )
    groups = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    device = named[0][1].device
    plan = Plan(compression=compression, shard="optimizer")
    parts = EngineParts(model, optimizer, named, comm, plan, device, variables=variables)
    refuse(parts)
    reducer = DividedReducer(
        make_sharded(parts, weight=weight, name=name),
        named,
        comm,
        name=name,
        passes=passes,
        weight=weight,
        factor=factor,
        sums_each_pass=shard == "gradients",
    )
    return DividedExchange(reducer, model, groups, session)


def _check(optimizer: Optimizer, comm: Comm, compression: str, shard: str) -> None:
    if comm.size == 1:
        raise ConfigError(
            f'shard="{shard}" divides the optimizer among ranks',
            expected="2 or more ranks, this one included",
            found="1 rank",
            next_step='shard="none" on one rank; the loop may stay the same',
        )
    if isinstance(optimizer, (torch.optim.LBFGS, torch.optim.SparseAdam)):
        raise ConfigError(
            f"{type(optimizer).__name__} cannot be divided among ranks",
            expected="an optimizer that updates each tensor by itself, such as AdamW, from dense gradients",
            next_step='or shard="none"',
        )
    supported = compressions(Plan(shard=shard))
    kind = parse(compression).kind.name
    if kind not in supported:
        raise ConfigError(
            f'shard="{shard}" does not support compression="{compression}"',
            expected=", ".join(supported),
            next_step='choose one of these, or shard="none"',
        )
