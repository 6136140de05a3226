"""All of `horovod.torch`, with an optimizer that exchanges gradients as hvdtrain does.

::

    import hvdtrain.torch as hvd     # instead of: import horovod.torch as hvd

What is not defined here is Horovod's own, its submodules too. `DistributedOptimizer` is ours, and `init` settles first
what is known to make MPI and Horovod fast, as `hvdtrain.train` does; what is set in the environment stays.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from hvdtrain.errors import LaunchError
from hvdtrain.runtime.other_launchers import refuse_unused_launcher
from hvdtrain.torch.optimizer import DistributedOptimizer as DistributedOptimizer
from hvdtrain.torch.optimizer import choices, info  # first: it prepares what is loaded next

from hvdtrain.comm.horovod import begin_session, hvd, mpi_ops  # isort: skip
from hvdtrain.torch.elastic import seated  # isort: skip
from hvdtrain.training.start.device import take_threads  # isort: skip

__all__ = [name for name in dir(hvd) if not name.startswith("_")]

# One copy of each: a second one would know nothing of the state of the first.
for _name in ("compression", "functions", "mpi_ops", "sync_batch_norm", "elastic.sampler", "elastic.state"):
    sys.modules[f"{__name__}.{_name}"] = importlib.import_module(f"{hvd.__name__}.{_name}")


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
    refuse_unused_launcher(info)
    take_threads(choices)
    if (own := seated(info)) is not None:
        if arguments or keywords:
            raise LaunchError(
                "init has arguments, and ranks of hvdtrain launch --elastic are initialised anew without them.",
                next_step="hvd.init(); process sets by hvd.add_process_set()",
            )
        return None if hvd.is_initialized() else own.enter()
    if not hvd.is_initialized():
        begin_session()
    hvd.init(*arguments, **keywords)


def join(*arguments: Any, **keywords: Any) -> int:
    """Wait for ranks that have more batches: `horovod.torch.join`. The exchange starts anew then. Collective: yes."""
    last: int = hvd.join(*arguments, **keywords)
    begin_session()  # what compression has learned meanwhile, this rank has not
    return last


def _scale_before_reducescatter(name: str) -> None:
    """Multiply by `prescale_factor` before Horovod's reducescatter.

    Horovod does it in its fusion buffer, which has no room where `HOROVOD_FUSION_THRESHOLD` is 0, as `prepare` sets it.
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
