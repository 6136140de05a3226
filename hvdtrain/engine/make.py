"""Choose the engine of a job."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch import nn
from torch.optim import Optimizer

from hvdtrain.comm.base import Comm
from hvdtrain.compression.table import Compression, parse
from hvdtrain.engine.base import Engine
from hvdtrain.engine.consistency import check_same
from hvdtrain.engine.exchange import ExchangeEngine
from hvdtrain.engine.local import LocalEngine
from hvdtrain.errors import ConfigError, TaskError
from hvdtrain.exchange.reducer import Reducer
from hvdtrain.runtime.environment import by_gloo
from hvdtrain.runtime.rules import NICE
from hvdtrain.runtime.threads import lower_own_priority
from hvdtrain.spans import Spans

AUTO = "auto"
"""Option value: choose the compression that pays, in the first steps."""


def prepare_exchange(
    compression: Compression, comm: Comm, variables: Mapping[str, str], bucket_mib: float | None = None
) -> int:
    """Return the bytes of the largest bucket; lower this thread's priority if bulk data is sent between hosts.

    Args:
        compression: of the exchange.
        comm: the ranks.
        variables: the environment of this process.
        bucket_mib: bucket size; None for the compression's default.
    """
    one_host = comm.local_size >= comm.size
    if compression.kind.bulk and not one_host:
        lower_own_priority(variables.get(NICE, ""))
    return int(bucket_mib * (1 << 20)) if bucket_mib else compression.bucket_bytes(one_host=one_host)


def resolve_compression(text: str, device: torch.device, variables: Mapping[str, str]) -> Compression:
    """Return the compression that an option names, in its best variant for `device` and the job of `variables`."""
    compression = parse(text)
    return compression.where_halves_are_slow() if device.type == "cpu" and by_gloo(variables) else compression


def check_compression(text: str) -> None:
    """Check that an option names a compression, or is `AUTO`.

    Errors:
        ConfigError: it does neither.
    """
    try:
        if text != AUTO:
            parse(text)
    except ConfigError as error:
        raise ConfigError(error.what, expected=f"{error.expected}, {AUTO}", next_step=error.next_step) from None


def make_engine(
    optimizer: Optimizer,
    model: nn.Module,
    comm: Comm,
    compression: str,
    spans: Spans | None = None,
    bucket_mib: float | None = None,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Engine:
    """Make the engine that fits the job. Collective: yes.

    `spans` records the exchange; `variables` is the environment of this process.

    Errors:
        LaunchError: model or optimizer differ between ranks; on every rank.
        TaskError: the optimizer has a parameter from outside the model.
    """
    check_same(model, optimizer, comm)
    parameters = _named(optimizer, model)
    if comm.size == 1 and compression in ("none", AUTO):
        return LocalEngine(parameters, optimizer)

    def trained() -> list[tuple[str, nn.Parameter]]:
        return [(name, parameter) for name, parameter in parameters if parameter.requires_grad]

    first = "none" if compression == AUTO else compression
    device = next((parameter.device for _, parameter in parameters), torch.device("cpu"))
    resolve = partial(resolve_compression, device=device, variables=variables)
    chosen = resolve(first)
    reducer = Reducer(
        trained, comm, chosen, bucket_bytes=prepare_exchange(chosen, comm, variables, bucket_mib), spans=spans
    )
    return ExchangeEngine(optimizer, reducer, first, undecided=compression == AUTO, resolve=resolve)


def _named(optimizer: Optimizer, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    optimized = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    strangers = [tuple(parameter.shape) for parameter in optimized - set(model.parameters())]
    if strangers:
        raise TaskError(
            "the task's optimizer has parameters from outside the model",
            expected="an optimizer over model.parameters() of the model that the task returns",
            found=f"{len(strangers)} such parameter(s), of shapes {', '.join(map(str, strangers[:3]))}",
        )
    # In the model's order, not the optimizer's: the exchange follows the order of backward.
    return [(name, p) for name, p in model.named_parameters() if p in optimized]
