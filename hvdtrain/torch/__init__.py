"""A drop-in for `horovod.torch` with hvdtrain's exchange of gradients.

::

    import hvdtrain.torch as hvd     # instead of: import horovod.torch as hvd

All other names and submodules are Horovod's own. `DistributedOptimizer` and `broadcast_optimizer_state` are ours.
`init` first applies the settings that make MPI and Horovod fast, as `hvdtrain.train` does; variables that are already
set stay.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from hvdtrain.errors import ConfigError, LaunchError
from hvdtrain.runtime.environment import refuse_unused_launcher
from hvdtrain.torch.optimizer import DistributedOptimizer as DistributedOptimizer
from hvdtrain.torch.optimizer import choices, info  # first: it prepares the environment for the next imports

from hvdtrain.comm.horovod import HorovodComm, begin_session, hvd, mpi_ops  # isort: skip
from hvdtrain.engine.own_exchange import DividedExchange  # isort: skip
from hvdtrain.torch.elastic import elastic_program  # isort: skip
from hvdtrain.state.optimizer_broadcast import broadcast_optimizer  # isort: skip
from hvdtrain.training.start.device import set_torch_threads  # isort: skip

__all__ = [name for name in dir(hvd) if not name.startswith("_")]

# One copy of each: a second one would not share the state of the first.
for _name in ("compression", "functions", "mpi_ops", "sync_batch_norm", "elastic.sampler", "elastic.state"):
    sys.modules[f"{__name__}.{_name}"] = importlib.import_module(f"{hvd.__name__}.{_name}")


def __getattr__(name: str) -> Any:
    """Return Horovod's attribute for every name that is not ours."""
    if name == "elastic":
        return importlib.import_module("hvdtrain.torch.elastic")
    return getattr(hvd, name)


def __dir__() -> list[str]:
    """List Horovod's names, which include ours."""
    return dir(hvd)


def init(*arguments: Any, **keywords: Any) -> None:
    """Join the job: `horovod.torch.init`, and this rank's share of the cores for torch. Collective: yes."""
    refuse_unused_launcher(info)
    set_torch_threads(choices)
    if (own := elastic_program(info)) is not None:
        if arguments or keywords:
            raise LaunchError(
                "init() has arguments, but hvdtrain launch --elastic initialises ranks again without them.",
                next_step="hvd.init(); process sets by hvd.add_process_set()",
            )
        return None if hvd.is_initialized() else own.enter()
    if not hvd.is_initialized():
        begin_session()
    hvd.init(*arguments, **keywords)


def join(*arguments: Any, **keywords: Any) -> int:
    """Wait for ranks that have more batches: `horovod.torch.join`. The exchange then restarts. Collective: yes."""
    last: int = hvd.join(*arguments, **keywords)
    begin_session()  # this rank lacks what compression has learned meanwhile
    return last


def broadcast_optimizer_state(optimizer: Any, root_rank: int, model: Any = None) -> None:
    """Copy the optimizer's state and options from a rank to all: Horovod's function, less its step. Collective: yes.

    Horovod's own makes state on ranks without one by a step, which changes their parameters, and sends no options of an
    optimizer without state. Of a divided optimizer, only the options of its groups are sent, such as the learning rate:
    no rank has the whole state. `model` is not needed.

    Errors:
        TaskError: it is divided, and a state was loaded on some ranks only; ranks have other parameters; or it has
            values that cannot be sent; on every rank.
        ConfigError: there is no such rank.
    """
    exchange = getattr(optimizer, "_hvdtrain_exchange", None)
    divided = exchange if isinstance(exchange, DividedExchange) else None
    ranks = list(optimizer.process_set.ranks) if divided else list(range(hvd.size()))
    if root_rank not in ranks:
        raise ConfigError("root_rank is not a rank of the optimizer", expected=f"one of {ranks}", found=str(root_rank))
    if divided is not None:
        divided.broadcast_options(ranks.index(root_rank))
    elif hvd.size() > 1:
        broadcast_optimizer(optimizer, HorovodComm(), root_rank)


for _name in ("functions", "elastic.state"):  # states of elastic programs call it there
    sys.modules[f"{hvd.__name__}.{_name}"].broadcast_optimizer_state = broadcast_optimizer_state  # type: ignore[attr-defined]


def _scale_before_reducescatter(name: str) -> None:
    """Multiply by `prescale_factor` before Horovod's reduce-scatter.

    Horovod does it in its fusion buffer, which is empty if `HOROVOD_FUSION_THRESHOLD` is 0, as `prepare` sets it.
    """
    stock: Callable[..., int] = getattr(mpi_ops, name)

    def scaled(tensor: Tensor, factor: float) -> Tensor:
        return (tensor * factor).to(tensor.dtype)

    @functools.wraps(stock)
    def exchange(tensors: Any, outputs: Any, called: Any, op: Any, ranks: Any, before: float, after: float) -> int:
        if before != 1.0:
            one = isinstance(tensors, Tensor)
            tensors = scaled(tensors, before) if one else [scaled(tensor, before) for tensor in tensors]
        return stock(tensors, outputs, called, op, ranks, 1.0, after)

    setattr(mpi_ops, name, exchange)


for _name in ("_reducescatter_async", "_grouped_reducescatter_async"):
    _scale_before_reducescatter(_name)
