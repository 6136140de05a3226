"""Checks on a model and on what the ranks hold of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hvdtrain.comm.base import Comm
from hvdtrain.errors import DriftError

_ROW_BYTES = 8192


def batch_statistics(model: nn.Module) -> list[str]:
    """Names of the modules whose training output depends on who shares their batch.

    With them the loss curve depends on micro-batches' contents only, but running statistics on the rank that saw them.
    """
    kinds = (nn.modules.batchnorm._BatchNorm, nn.SyncBatchNorm)
    return [name for name, module in model.named_modules() if isinstance(module, kinds)]


def digests(model: nn.Module) -> Tensor:
    """One number a parameter, a function of its bits: (N,) int64 on the CPU."""
    numbers = [_digest(parameter.detach()) for parameter in model.parameters()]
    return torch.stack(numbers).cpu() if numbers else torch.zeros(0, dtype=torch.int64)


def _digest(tensor: Tensor) -> Tensor:
    bits = tensor.contiguous().flatten().view(torch.uint8)
    whole = len(bits) // _ROW_BYTES * _ROW_BYTES
    # Two sums, the second weighted by position within a row: a swap of two elements is seen too. Modulo 2^64.
    columns = bits[:whole].view(torch.int64).view(-1, _ROW_BYTES // 8).sum(dim=0)
    if whole < len(bits):
        rest = nn.functional.pad(bits[whole:], (0, -(len(bits) - whole) % 8)).view(torch.int64)
        columns[: len(rest)] += rest
    weights = torch.arange(1, len(columns) + 1, dtype=torch.int64, device=columns.device)
    return (columns * (weights * 2654435761 + 97)).sum()


def check_equal(model: nn.Module, comm: Comm, *, name: str) -> None:
    """See that every parameter is bit for bit the same on all ranks. Collective: yes.

    Errors:
        DriftError: on every rank, with the first parameter that differs and the ranks that differ from rank 0.
    """
    mine = digests(model)
    everyone = comm.allgather(mine.unsqueeze(0), name=name).wait()
    unequal = (everyone != everyone[0]).nonzero()
    if len(unequal) == 0:
        return
    names = [n for n, _ in model.named_parameters()]
    ranks = sorted({int(rank) for rank, _ in unequal})
    first = names[min(int(index) for _, index in unequal)]
    raise DriftError(
        f"parameters are not equal on all ranks: {first} differs on rank(s) {', '.join(map(str, ranks))}",
        expected="bit-equal parameters after every step",
        next_step="a model whose forward pass writes to parameters, or unlike CPUs or GPUs, can cause this;"
        " go on from the last checkpoint with the same command",
    )
