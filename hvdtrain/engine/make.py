"""Choose the engine of a job; check first that all ranks have the same model and optimizer, instead of hanging."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import allgather_json, broadcast_json
from hvdtrain.engine.base import Engine
from hvdtrain.engine.in_all_copies import InAllCopies
from hvdtrain.engine.one_rank import OneRank
from hvdtrain.engine.parts import EngineParts, named_parameters
from hvdtrain.engine.refusals import refuse
from hvdtrain.errors import ETC, LaunchError, listed
from hvdtrain.exchange.buckets import prepare_exchange, resolve_compression
from hvdtrain.exchange.in_order import Leaves
from hvdtrain.exchange.reducer import Reducer
from hvdtrain.plan.plan import AUTO, Plan
from hvdtrain.spans import Spans


def make_engine(
    optimizer: Optimizer,
    model: nn.Module,
    comm: Comm,
    plan: Plan,
    spans: Spans | None = None,
    variables: Mapping[str, str] = MappingProxyType({}),
    device: torch.device | None = None,
    styles: Mapping[str, str] = MappingProxyType({}),
) -> Engine:
    """Make the engine of a plan for the ranks of `comm`. Collective: yes.

    `spans` record the exchange; `variables` is the environment of this process; `device` is where training runs
    (default: that of the model); `styles` are the task's, by which ranks divide the model (default: its own).

    Errors:
        ConfigError: plan, model, optimizer and device do not fit together.
        LaunchError: model or optimizer differ between ranks; on every rank.
        TaskError: the optimizer has a parameter from outside the model.
    """
    check_same(model, optimizer, comm)
    parameters = named_parameters(optimizer, model)
    device = device or next((parameter.device for _, parameter in parameters), torch.device("cpu"))
    parts = EngineParts(model, optimizer, parameters, comm, plan, device, spans, variables, styles)
    refuse(parts)
    is_whole = plan.shard == "none" and not plan.dimensions.divides_model
    if comm.size == 1 and is_whole and (plan.compression in ("none", AUTO) or plan.engine != "horovod"):
        return Engine(optimizer, OneRank(parts.optimized, Leaves(comm) if plan.bits else None))
    module, name = _MAKERS[plan.engine, not is_whole, plan.dimensions.divides_model]
    engine: Engine = getattr(import_module(f"hvdtrain.engine.{module}"), name)(parts)
    return engine


_MAKERS = {
    ("horovod", False, False): ("make", "make_exchange"),
    ("horovod", True, False): ("sharded", "make_sharded"),
    ("horovod", True, True): ("mesh", "make_mesh_engine"),
    ("ddp", False, False): ("ddp", "make_ddp"),
    ("fsdp", True, False): ("fsdp", "make_fsdp"),
    ("fsdp", True, True): ("fsdp", "make_fsdp"),
}
"""Module and function by what sums gradients, and whether ranks divide anything, and the model."""


def make_exchange(parts: EngineParts) -> Engine:
    """Make the engine that exchanges gradients by `comm`."""
    comm, variables = parts.comm, parts.variables

    def trained() -> list[tuple[str, nn.Parameter]]:
        return [(name, parameter) for name, parameter in parts.optimized() if parameter.requires_grad]

    first = "none" if parts.plan.compression == AUTO else parts.plan.compression
    resolve = partial(resolve_compression, device=parts.device, variables=variables)
    chosen = resolve(first)
    bucket_bytes = prepare_exchange(chosen, comm, variables, parts.plan.bucket_mib)
    leaves = Leaves(comm) if parts.plan.bits else None
    reducer = Reducer(trained, comm, chosen, bucket_bytes=bucket_bytes, spans=parts.spans, leaves=leaves)
    sums = InAllCopies(reducer, first, undecided=parts.plan.compression == AUTO, resolve=resolve, leaves=leaves)
    return Engine(parts.optimizer, sums)


def check_same(model: nn.Module, optimizer: Optimizer, comm: Comm) -> None:
    """Check that parameters, buffers and optimizer groups are the same on all ranks. Collective: yes.

    It compares names, order, shapes, dtypes and requires_grad. If all are equal, only a digest of each rank is sent.
    Learning rates and similar values may differ: those of rank 0 are used.

    Errors: LaunchError: on every rank, with the first difference and its rank.
    """
    mine = list(_facts(model, optimizer))
    digest = hashlib.sha256(json.dumps(mine).encode()).digest()
    everyone = comm.allgather(torch.frombuffer(bytearray(digest), dtype=torch.uint8)[None], name="same/digest").wait()
    if bool((everyone == everyone[0]).all()):
        return
    expected = broadcast_json(comm, mine, name="same/facts")
    for rank, difference in enumerate(allgather_json(comm, _difference(expected, mine), name="same/difference")):
        if difference is not None:
            name, there, here = difference
            raise LaunchError(
                f"the model of rank {rank} is not that of rank 0: {name} differs",
                expected=f"{there} as on rank 0",
                found=here,
                next_step="build model and optimizer only from the config, the same way on every rank and host",
                everywhere=True,
            )


def _facts(model: nn.Module, optimizer: Optimizer) -> Iterator[list[str]]:
    """Yield pairs of a name and its value that must be equal; those that explain others come first."""
    names = {}
    for name, parameter in model.named_parameters():
        names[parameter] = name
        trained = "" if parameter.requires_grad else ", not trained"
        yield [name, f"a parameter {_tensor(parameter)}{trained}"]
    for name, buffer in model.named_buffers():
        yield [name, f"a buffer {_tensor(buffer)}"]
    yield ["the order of the model's parameters", _shortened(list(names.values()))]
    yield ["the optimizer", f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"]
    for number, group in enumerate(optimizer.param_groups):
        # Sorted: a program may take them from a set.
        members = sorted(names.get(parameter, "a parameter outside the model") for parameter in group["params"])
        yield [f"the optimizer's group {number}", f"{len(members)} parameter(s): {_shortened(members)}"]
        options = sorted(str(option) for option in group if option != "params")
        yield [f"the set of options in the optimizer's group {number}", ", ".join(options)]


def _tensor(tensor: Tensor) -> str:
    return f"of shape {tuple(tensor.shape)} and dtype {str(tensor.dtype).removeprefix('torch.')}"


def _shortened(names: list[str]) -> str:
    """Return a few names, and a digest of all."""
    digest = hashlib.sha256(json.dumps(names).encode()).hexdigest()[:12]
    return f"{listed(names, rest=ETC)} (digest of all: {digest})"


def _difference(rank_0: list[list[str]], mine: list[list[str]]) -> list[Any] | None:
    """Return the first difference: its name, the value on rank 0, and the value here."""
    theirs, ours = ({name: value for name, value in facts} for facts in (rank_0, mine))  # noqa: C416
    for name in dict.fromkeys([*theirs, *ours]):
        if theirs.get(name) != ours.get(name):
            return [name, theirs.get(name, "none"), ours.get(name, "none")]
    return None
