"""All of `horovod.torch`, with an optimizer that exchanges gradients as hvdtrain does.

::

    import hvdtrain.torch as hvd     # instead of: import horovod.torch as hvd

What is not defined here is Horovod's own. `DistributedOptimizer` is ours, and `init` settles first what is known to
make MPI and Horovod fast, as `hvdtrain.train` does; what is set in the environment stays.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.runtime.tuning import prepare

_, _choices = prepare()  # before Horovod and MPI are loaded

from hvdtrain.comm.horovod import HorovodComm, begin_session, hvd, session  # noqa: E402
from hvdtrain.comm.solo import SoloComm  # noqa: E402
from hvdtrain.compression.table import parse  # noqa: E402
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
        groups: how many buckets, or lists of parameters that share one; by size otherwise.
        sparse_as_dense: exchange sparse gradients as dense ones.
        process_set: the ranks to average over.

    Errors:
        ConfigError: an argument that makes no sense.
        TaskError: names that are missing or double, or an optimizer that was made distributed before.
    """
    ours = compression if isinstance(compression, str) else _COMPRESSIONS.get(compression)
    if op == hvd.Adasum or ours is None:
        return _horovods(optimizer, named_parameters, compression, backward_passes_per_step, op, process_set)
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
        comm: Comm = HorovodComm(process_set) if process_set.size() > 1 else SoloComm()
        if op == hvd.Sum:
            return comm, 1.0, 1.0
        # Divided before the sum, which needs no second pass over the gradients and cannot overflow in fp16.
        return (comm, 1.0 / comm.size, 1.0) if predivide == 1.0 else (comm, 1.0 / predivide, predivide / comm.size)

    def trained() -> list[tuple[str, nn.Parameter]]:
        return [
            (names.get(parameter, f"group{number}.{index}"), parameter)
            for number, group in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
            if parameter.requires_grad
        ]

    comm, weight, factor = terms()
    named_groups, limit = _groups(num_groups if groups is None else groups, trained())
    reducer = Reducer(
        trained,
        comm,
        parse(ours).load(),
        bucket_bytes=limit,
        weight=weight,
        factor=factor,
        passes=backward_passes_per_step,
        groups=named_groups,
        sparse_as_dense=sparse_as_dense,
        name=fresh_name(),
    )
    return exchanging(optimizer, Exchange(reducer, terms, session))


def _names(named_parameters: Iterable[tuple[str, nn.Parameter]] | None) -> dict[nn.Parameter, str]:
    names: dict[nn.Parameter, str] = {}
    for name, parameter in named_parameters or ():
        if name in names.values():
            raise TaskError(f"two parameters are called {name}", expected="model.named_parameters()")
        names.setdefault(parameter, name)
    return names


def _groups(
    groups: int | Sequence[Sequence[Tensor]], named: Sequence[tuple[str, nn.Parameter]]
) -> tuple[list[list[str]], int | None]:
    """Names that share a bucket, and the largest size of the others where it is given."""
    if isinstance(groups, int):
        total = sum(p.numel() * p.element_size() for _, p in named)
        return [], -(-total // groups) if groups > 0 else None
    of = {id(parameter): name for name, parameter in named}
    return [[of[id(p)] for p in group if id(p) in of] for group in groups], None


def _horovods(
    optimizer: Optimizer, named_parameters: Any, compression: Any, passes: int, op: Any, process_set: Any
) -> Optimizer:
    """Horovod's own optimizer, for what it alone can: Adasum, and compression by a class of the user's."""
    own = {name: kind for kind, name in _COMPRESSIONS.items()}
    if isinstance(compression, str):
        if compression not in own:
            raise ConfigError(
                f"op=Adasum goes with no {compression} compression", expected=" or ".join(own), found=compression
            )
        compression = own[compression]
    wrapped: Optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=named_parameters,
        compression=compression,
        backward_passes_per_step=passes,
        op=op,
        process_set=process_set,
    )
    return wrapped
