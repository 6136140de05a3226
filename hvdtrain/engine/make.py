"""Which engine a job gets."""

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
from hvdtrain.runtime.threads import give_way
from hvdtrain.spans import Spans

AUTO = "auto"
"""Stands for the compression that pays, found out in the first steps."""


def settle_in(
    compression: Compression, comm: Comm, variables: Mapping[str, str], bucket_mib: float | None = None
) -> int:
    """Bytes of the largest bucket. Where bulk is sent between hosts, this thread makes room for it from now on.

    Args:
        compression: how gradients travel.
        comm: the ranks.
        variables: the environment of this process.
        bucket_mib: another size than that which suits the compression.
    """
    one_host = comm.local_size >= comm.size
    if compression.kind.bulk and not one_host:
        give_way(variables.get(NICE, ""))
    return int(bucket_mib * (1 << 20)) if bucket_mib else compression.bucket_bytes(one_host=one_host)


def suited(text: str, device: torch.device, variables: Mapping[str, str]) -> Compression:
    """The compression that an option names, as it is best done for gradients on `device` in the job of `variables`."""
    found = parse(text)
    return found.where_halves_are_slow() if device.type == "cpu" and by_gloo(variables) else found


def check_compression(text: str) -> None:
    """See that an option names a compression, or `AUTO`.

    Errors:
        ConfigError: it does not.
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
    """Give an optimizer over the model's parameters the exchange that fits the job. Collective: yes.

    `spans` is told of it; `variables` is the environment of this process.

    Errors:
        LaunchError: model or optimizer is not the same on all ranks; on every rank.
        TaskError: the optimizer holds a parameter that is not the model's.
    """
    check_same(model, optimizer, comm)
    parameters = _named(optimizer, model)
    if comm.size == 1 and compression in ("none", AUTO):
        return LocalEngine(parameters, optimizer)

    def trained() -> list[tuple[str, nn.Parameter]]:
        return [(name, parameter) for name, parameter in parameters if parameter.requires_grad]

    first = "none" if compression == AUTO else compression
    device = next((parameter.device for _, parameter in parameters), torch.device("cpu"))
    meant = partial(suited, device=device, variables=variables)
    chosen = meant(first)
    reducer = Reducer(trained, comm, chosen, bucket_bytes=settle_in(chosen, comm, variables, bucket_mib), spans=spans)
    return ExchangeEngine(optimizer, reducer, first, undecided=compression == AUTO, meant=meant)


def _named(optimizer: Optimizer, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    strangers = [tuple(parameter.shape) for parameter in held - set(model.parameters())]
    if strangers:
        raise TaskError(
            "the task's optimizer holds parameters that are not the model's",
            expected="an optimizer made from model.parameters() of the same model that the task returns",
            found=f"{len(strangers)} other(s), of shapes {', '.join(map(str, strangers[:3]))}",
        )
    # In the model's order, not the optimizer's: the exchange follows backward.
    return [(name, p) for name, p in model.named_parameters() if p in held]
