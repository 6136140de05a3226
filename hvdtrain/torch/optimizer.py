"""`DistributedOptimizer` with our exchange; all other names are those of `horovod.torch.optimizer`."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.runtime.tuning import prepare

info, choices = prepare()  # before Horovod and MPI are loaded

from hvdtrain.comm.horovod import HorovodComm, hvd, session  # noqa: E402
from hvdtrain.comm.solo import SoloComm  # noqa: E402
from hvdtrain.engine.own_optimizer import SHARDS, divide_optimizer  # noqa: E402
from hvdtrain.errors import ConfigError  # noqa: E402
from hvdtrain.exchange.buckets import prepare_exchange, resolve_compression  # noqa: E402
from hvdtrain.exchange.optimizer import exchanging, fresh_name, refuse_second  # noqa: E402
from hvdtrain.exchange.own_loop import Exchange  # noqa: E402
from hvdtrain.exchange.reducer import Reducer  # noqa: E402

if TYPE_CHECKING:
    from hvdtrain.comm.base import Comm

_stock = importlib.import_module("horovod.torch.optimizer")
__all__ = [name for name in dir(_stock) if not name.startswith("_")]
_COMPRESSIONS = {hvd.Compression.none: "none", hvd.Compression.fp16: "fp16"}


def __getattr__(name: str) -> Any:
    """Return Horovod's attribute for every name that is not ours."""
    return getattr(_stock, name)


def DistributedOptimizer(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
    compression: Any = "none",
    backward_passes_per_step: int = 1,
    op: Any = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: Any = hvd.global_process_set,
    gradient_as_bucket_view: bool = False,
    shard: str = "none",
) -> Optimizer:
    """Make an optimizer use gradients averaged over all ranks: `hvd.DistributedOptimizer` with our exchange.

    It changes and returns the given optimizer; its state, schedulers and type stay. The optimizer gains `synchronize`,
    `skip_synchronize` and `set_backward_passes_per_step`; `clip_grad_norm_(max_norm)`, to be called between backward
    and `step`; `gather_state_dict`; and for the state of compression `exchange_state_dict` and
    `load_exchange_state_dict`.

    With ``shard="optimizer"`` each rank has and updates a part of the optimizer's state (ZeRO-1). `step` returns when
    all ranks have all new parameters. All ranks call `DistributedOptimizer`, `clip_grad_norm_` and `gather_state_dict`,
    which returns the whole state on rank 0; each rank passes a whole state to `load_state_dict`. The summed gradients
    are at their owners: ``p.grad`` of a parameter cannot be used after its backward pass.

    Args:
        optimizer: with the interface of torch's optimizers.
        named_parameters: such as ``model.named_parameters()``; equal on all ranks.
        compression: "none", "fp16", "powersgd:4" and so on (`hvdtrain.compression.table`), or Horovod's own
            ``Compression.none`` and ``Compression.fp16``. For a class of your own, returns Horovod's optimizer.
        backward_passes_per_step: gradients of this many passes are added up before they are exchanged.
        op: Average or Sum; for another, returns Horovod's own optimizer.
        gradient_predivide_factor: gradients are divided by it before the sum and multiplied after it.
        num_groups: the older name of `groups`.
        groups: number of buckets of about equal size, or lists of parameters that share a bucket; default: by size.
        sparse_as_dense: exchange sparse gradients as dense ones.
        process_set: the ranks to average over; any other rank trains alone.
        gradient_as_bucket_view: make gradients views of the exchange buffers, as in ``DistributedDataParallel``. This
            saves the memory of the gradients and a copy a step. Between backward and `synchronize` or `step`,
            parameters then have no gradient, and afterwards a different tensor than before. No effect with `shard`.
        shard: what is divided among the ranks: "none"; "optimizer"; or "gradients", which also sums the gradients of
            each of several backward passes at once, so that no rank keeps them (ZeRO-2).

    Errors:
        ConfigError: an invalid argument, such as missing or duplicate names, or what `shard` does not support; it is a
            ValueError.
        TaskError: the optimizer is already distributed.
    """
    attributes = {
        "backward_passes_per_step": backward_passes_per_step,
        "op": op,
        "gradient_predivide_factor": gradient_predivide_factor,
        "sparse_as_dense": sparse_as_dense,
        "process_set": process_set,
    }
    groups = num_groups or None if groups is None else groups
    if shard != "none":
        _check_shard(shard, op, compression, groups, sparse_as_dense=sparse_as_dense)
    ours = compression if isinstance(compression, str) else _COMPRESSIONS.get(compression)
    if op not in (hvd.Average, hvd.Sum) or ours is None:
        wrapped: Optimizer = hvd.DistributedOptimizer(
            optimizer,
            compression=_stock_compression(compression),
            named_parameters=named_parameters,
            groups=groups,
            **attributes,
        )
        return wrapped
    if backward_passes_per_step < 1 or gradient_predivide_factor <= 0:
        raise ConfigError(
            "an argument of DistributedOptimizer is out of range",
            expected="backward_passes_per_step >= 1 and gradient_predivide_factor > 0",
            found=f"backward_passes_per_step={backward_passes_per_step},"
            f" gradient_predivide_factor={gradient_predivide_factor}",
        )
    if gradient_predivide_factor != 1.0 and op != hvd.Average:
        raise ConfigError("gradient_predivide_factor requires op=Average")
    predivide = gradient_predivide_factor
    names = _names(named_parameters, optimizer)

    def terms() -> tuple[Comm, float, float]:
        # A rank outside the set trains alone.
        among = hvd.size() > 1 and process_set.included() and process_set.size() > 1
        comm: Comm = HorovodComm(process_set) if among else SoloComm()
        if op == hvd.Sum:
            return comm, 1.0, 1.0
        # Divided before the sum, which needs no second pass over the gradients and cannot overflow in fp16.
        return (comm, 1.0 / comm.size, 1.0) if predivide == 1.0 else (comm, 1.0 / predivide, predivide / comm.size)

    def trained() -> list[tuple[str, nn.Parameter]]:
        return [(names.get(p, name), p) for p, name in _numbered(optimizer).items() if p.requires_grad]

    attributes["_parameter_names"] = {parameter: name for name, parameter in trained()}  # as Horovod's has
    grouped = _groups(groups, trained())
    comm, weight, factor = terms()
    common: dict[str, Any] = {"weight": weight, "factor": factor, "passes": backward_passes_per_step}
    common["name"] = fresh_name(process_set)
    exchange: Any
    if shard != "none":
        refuse_second(optimizer)
        own = _numbered(optimizer)
        named = [(name, p) for p, name in names.items() if p in own] or [(name, p) for p, name in own.items()]
        common |= {"shard": shard, "variables": info.variables}
        exchange = divide_optimizer(optimizer, named, comm, ours, session, **common)
    else:
        device = next((parameter.device for _, parameter in trained()), torch.device("cpu"))
        chosen = resolve_compression(ours, device, info.variables)
        reducer = Reducer(
            trained,
            comm,
            chosen,
            bucket_bytes=prepare_exchange(chosen, comm, info.variables),
            groups=grouped,
            sparse_as_dense=sparse_as_dense,
            as_views=gradient_as_bucket_view,
            **common,
        )
        exchange = Exchange(reducer, terms, session)
    wrapped = exchanging(optimizer, exchange)
    wrapped.__dict__.update(attributes)
    return wrapped


def _check_shard(shard: str, op: Any, compression: Any, groups: Any, *, sparse_as_dense: bool) -> None:
    """Check that `shard` supports the other arguments, and the job.

    Errors: ConfigError: it does not, or there is no such shard.
    """
    if shard not in SHARDS:
        raise ConfigError("invalid shard of DistributedOptimizer", expected=", ".join(SHARDS), found=repr(shard))
    refused = {
        "op": op not in (hvd.Average, hvd.Sum),
        "compression of your own": not isinstance(compression, str) and compression not in _COMPRESSIONS,
        "groups": groups is not None,
        "sparse_as_dense": sparse_as_dense,
        "an elastic job": info.variables.get("HOROVOD_ELASTIC", "0") not in ("", "0"),
    }
    if found := [argument for argument, is_refused in refused.items() if is_refused]:
        raise ConfigError(
            f'shard="{shard}" does not support {", ".join(found)}',
            expected="op=Average or Sum, a compression by name, buckets by size, dense gradients, and constant ranks",
            next_step='change these, or use shard="none"',
        )


def _numbered(optimizer: Optimizer) -> dict[nn.Parameter, str]:
    """Return the parameters of the optimizer, named by their places in its groups."""
    groups = enumerate(optimizer.param_groups)
    return {p: f"group{number}.{index}" for number, group in groups for index, p in enumerate(group["params"])}


def _names(
    named_parameters: Iterable[tuple[str, nn.Parameter]] | None, optimizer: Optimizer
) -> dict[nn.Parameter, str]:
    """Return the name of each parameter; the first, if it has two.

    Errors: ConfigError: two parameters have the same name, or a parameter of the optimizer has none.
    """
    names: dict[nn.Parameter, str] = {}
    if named_parameters is None:
        return names
    seen: set[str] = set()
    for pair in named_parameters:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ConfigError(
                "named_parameters must be pairs of name and parameter",
                expected="model.named_parameters()",
                found=type(pair).__name__,
            )
        name, parameter = pair
        if name in seen:
            raise ConfigError(f"two parameters are named {name}", expected="model.named_parameters()")
        seen.add(name)
        names.setdefault(parameter, name)
    unnamed = [p for group in optimizer.param_groups for p in group["params"] if p not in names]
    if unnamed:
        raise ConfigError(
            "named_parameters lack some parameters of the optimizer",
            expected="model.named_parameters() of each model that it trains, or no named_parameters",
            found=f"{len(unnamed)} without a name, the first of shape {tuple(unnamed[0].shape)}",
        )
    return names


def _groups(groups: Any, named: Sequence[tuple[str, nn.Parameter]]) -> list[list[str]]:
    """Return the names of parameters that share a bucket: as listed, or runs of about equal size.

    Errors: ConfigError: neither None, a number above 0, nor lists of tensors without repetition.
    """
    if groups is None:
        return []
    found = ""
    if isinstance(groups, int):
        found = str(groups) if groups <= 0 else ""
    elif not all(isinstance(p, Tensor) for group in groups for p in group):
        found = "it lists a value that is not a tensor"
    elif len({id(p) for group in groups for p in group}) < sum(map(len, groups)):
        found = "it lists a parameter twice"
    if found:
        raise ConfigError(
            f"the argument groups of DistributedOptimizer is invalid: {found}",
            expected="a number above 0, or lists of parameters",
        )
    if not isinstance(groups, int):
        names = {id(parameter): name for name, parameter in named}
        return [[names[id(p)] for p in group if id(p) in names] for group in groups]
    runs: list[list[str]] = [[] for _ in range(groups)]
    ends = list(itertools.accumulate(p.numel() * p.element_size() for _, p in named))
    for (name, _), end in zip(named, ends, strict=True):
        runs[max(0, -(-end * groups // max(ends[-1], 1)) - 1)].append(name)
    return runs


def _stock_compression(compression: Any) -> Any:
    own = {name: kind for kind, name in _COMPRESSIONS.items()}
    if isinstance(compression, str) and compression not in own:
        raise ConfigError(
            f"this op does not support {compression} compression", expected=" or ".join(own), found=compression
        )
    return own.get(compression, compression)
