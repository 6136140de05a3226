"""All of `horovod.torch`, with an optimizer that exchanges gradients as hvdtrain does.

::

    import hvdtrain.torch as hvd     # instead of: import horovod.torch as hvd

What is not defined here is Horovod's own. `DistributedOptimizer` is ours, and `init` settles first what is known to
make MPI and Horovod fast, as `hvdtrain.train` does; what is set in the environment stays.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.runtime.other_launchers import refuse_unused_launcher
from hvdtrain.runtime.tuning import prepare

_info, _choices = prepare()  # before Horovod and MPI are loaded

from hvdtrain.comm.horovod import HorovodComm, begin_session, hvd, session  # noqa: E402
from hvdtrain.comm.solo import SoloComm  # noqa: E402
from hvdtrain.engine.make import settle_in, suited  # noqa: E402
from hvdtrain.errors import ConfigError, TaskError  # noqa: E402
from hvdtrain.exchange.optimizer import Exchange, exchanging, fresh_name  # noqa: E402
from hvdtrain.exchange.reducer import Reducer  # noqa: E402
from hvdtrain.training.device import take_threads  # noqa: E402

if TYPE_CHECKING:
    from hvdtrain.comm.base import Comm

_COMPRESSIONS = {hvd.Compression.none: "none", hvd.Compression.fp16: "fp16"}


def __getattr__(name: str) -> Any:
    """Whatever is not ours is `horovod.torch`'s."""
    if name == "elastic":
        return importlib.import_module("hvdtrain.torch.elastic")
    return getattr(hvd, name)


def __dir__() -> list[str]:
    """Our names and Horovod's."""
    return sorted({*globals(), *dir(hvd)})


def init(*arguments: Any, **keywords: Any) -> None:
    """Join the job: `horovod.torch.init`, and this rank's share of the cores for torch. Collective: yes."""
    refuse_unused_launcher(_info)
    take_threads(_choices)
    if not hvd.is_initialized():
        begin_session()
    hvd.init(*arguments, **keywords)


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
) -> Optimizer:
    """Make an optimizer follow gradients that are averaged over all ranks: `hvd.DistributedOptimizer` by our exchange.

    The optimizer that is given is changed and returned; its state, its schedulers and its type stay. Beside what every
    optimizer can, it has `synchronize`, `skip_synchronize`, `set_backward_passes_per_step`, and, for what compression
    carries from step to step, `exchange_state_dict` and `load_exchange_state_dict`.

    Args:
        optimizer: any of torch's or with its interface.
        named_parameters: such as ``model.named_parameters()``; equal on all ranks.
        compression: "none", "fp16", "powersgd:4" and so on (`hvdtrain.compression.table`), or Horovod's own
            ``Compression.none`` and ``Compression.fp16``. With a class of the user's Horovod's optimizer is returned.
        backward_passes_per_step: gradients of this many passes are added up before they are exchanged.
        op: Average or Sum; with Adasum, Horovod's own optimizer is returned.
        gradient_predivide_factor: gradients are divided by it before the sum and multiplied after it.
        num_groups: the older name of `groups`.
        groups: how many buckets of about equal size, or lists of parameters that share one; by size otherwise.
        sparse_as_dense: exchange sparse gradients as dense ones, which they stay.
        process_set: the ranks to average over; one that is not in it trains alone.

    Errors:
        ConfigError: an argument that makes no sense.
        TaskError: names that are missing or double, or an optimizer that was made distributed before.
    """
    ours = compression if isinstance(compression, str) else _COMPRESSIONS.get(compression)
    if op == hvd.Adasum or ours is None:
        return _horovods(
            optimizer,
            _horovods_compression(compression),
            named_parameters=named_parameters,
            backward_passes_per_step=backward_passes_per_step,
            op=op,
            gradient_predivide_factor=gradient_predivide_factor,
            groups=groups or num_groups or None,
            sparse_as_dense=sparse_as_dense,
            process_set=process_set,
        )
    if backward_passes_per_step < 1 or gradient_predivide_factor <= 0 or op not in (hvd.Average, hvd.Sum):
        raise ConfigError(
            "DistributedOptimizer cannot be made so",
            expected="backward_passes_per_step >= 1, gradient_predivide_factor > 0, op Average, Sum or Adasum",
            found=f"{backward_passes_per_step}, {gradient_predivide_factor}, {op}",
        )
    if gradient_predivide_factor != 1.0 and op != hvd.Average:
        raise ConfigError("gradient_predivide_factor goes with op=Average only")
    predivide = gradient_predivide_factor
    names = _names(named_parameters)

    def terms() -> tuple[Comm, float, float]:
        # A rank that is not in the set trains alone.
        among = hvd.size() > 1 and process_set.included() and process_set.size() > 1
        comm: Comm = HorovodComm(process_set) if among else SoloComm()
        if op == hvd.Sum:
            return comm, 1.0, 1.0
        # Divided before the sum, which needs no second pass over the gradients and cannot overflow in fp16.
        return (comm, 1.0 / comm.size, 1.0) if predivide == 1.0 else (comm, 1.0 / predivide, predivide / comm.size)

    def trained() -> list[tuple[str, nn.Parameter]]:
        return [
            (names.get(parameter) or f"group{number}.{index}", parameter)
            for number, group in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
            if parameter.requires_grad
        ]

    comm, weight, factor = terms()
    device = next((parameter.device for _, parameter in trained()), torch.device("cpu"))
    chosen = suited(ours, device, _info.variables)
    reducer = Reducer(
        trained,
        comm,
        chosen,
        bucket_bytes=settle_in(chosen, comm, _info.variables),
        weight=weight,
        factor=factor,
        passes=backward_passes_per_step,
        groups=_groups(num_groups if groups is None else groups, trained()),
        sparse_as_dense=sparse_as_dense,
        name=fresh_name(process_set.process_set_id),
    )
    return exchanging(optimizer, Exchange(reducer, terms, session))


def _names(named_parameters: Iterable[tuple[str, nn.Parameter]] | None) -> dict[nn.Parameter, str]:
    names: dict[nn.Parameter, str] = {}
    seen: set[str] = set()
    for pair in named_parameters or ():
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise TaskError(
                "named_parameters are no pairs of name and parameter",
                expected="model.named_parameters()",
                found=type(pair).__name__,
            )
        name, parameter = pair
        if name in seen:
            raise TaskError(f"two parameters are called {name}", expected="model.named_parameters()")
        seen.add(name)
        names.setdefault(parameter, name)
    return names


def _groups(groups: int | Sequence[Sequence[Tensor]], named: Sequence[tuple[str, nn.Parameter]]) -> list[list[str]]:
    """Names of those that share a bucket: as listed, or runs of about equal size; the others go by size."""
    if isinstance(groups, int):
        if groups < 0:
            raise ConfigError(
                "groups cannot be negative", expected="how many, or lists of parameters", found=f"{groups}"
            )
        runs: list[list[str]] = [[] for _ in range(groups)]
        ends = list(itertools.accumulate(p.numel() * p.element_size() for _, p in named))
        for (name, _), end in zip(named if groups else (), ends, strict=False):
            runs[max(0, -(-end * groups // max(ends[-1], 1)) - 1)].append(name)
        return runs
    of = {id(parameter): name for name, parameter in named}
    return [[of[id(p)] for p in group if id(p) in of] for group in groups]


def _horovods_compression(compression: Any) -> Any:
    own = {name: kind for kind, name in _COMPRESSIONS.items()}
    if isinstance(compression, str) and compression not in own:
        raise ConfigError(
            f"op=Adasum goes with no {compression} compression", expected=" or ".join(own), found=compression
        )
    return own.get(compression, compression)


def _horovods(optimizer: Optimizer, compression: Any, **arguments: Any) -> Optimizer:
    """Horovod's own optimizer, for what it alone can: Adasum, and compression by a class of the user's."""
    wrapped: Optimizer = hvd.DistributedOptimizer(optimizer, compression=compression, **arguments)
    return wrapped
