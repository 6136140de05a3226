"""Checks of a model, and of its equality on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from hvdtrain.comm.base import Comm
from hvdtrain.errors import DriftError
from hvdtrain.training.loop.buffers import persistent_buffers

_ROW_BYTES = 8192


def batch_statistics(model: nn.Module) -> list[str]:
    """Return the names of modules with batch statistics.

    With them the loss curve depends on the contents of micro-batches, and running statistics also on the ranks.
    """
    kinds = (nn.modules.batchnorm._BatchNorm, nn.SyncBatchNorm)
    return [name for name, module in model.named_modules() if isinstance(module, kinds)]


def replicated(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that every rank has a copy of: parameters, then persistent buffers."""
    return {**dict(model.named_parameters()), **persistent_buffers(model)}


def digests(tensors: Iterable[Tensor]) -> Tensor:
    """Return a hash of each tensor's bits: (N,) int64 on the CPU."""
    numbers = [_digest(tensor.detach()) for tensor in tensors]
    return torch.stack(numbers).cpu() if numbers else torch.zeros(0, dtype=torch.int64)


def _digest(tensor: Tensor) -> Tensor:
    bits = tensor.contiguous().flatten().view(torch.uint8)
    if bits.storage_offset() % 8:  # a slice of a flat buffer; eight bytes are read at a time
        bits = bits.clone()
    whole = len(bits) // _ROW_BYTES * _ROW_BYTES
    # Two sums, the second weighted by position in a row, so that a swap of two elements shows. Modulo 2^64.
    columns = bits[:whole].view(torch.int64).view(-1, _ROW_BYTES // 8).sum(dim=0)
    if whole < len(bits):
        rest = nn.functional.pad(bits[whole:], (0, -(len(bits) - whole) % 8)).view(torch.int64)
        columns[: len(rest)] += rest
    weights = torch.arange(1, len(columns) + 1, dtype=torch.int64, device=columns.device)
    return (columns * (weights * 2654435761 + 97)).sum()


def find_unequal(tensors: Mapping[str, Tensor], comm: Comm, *, name: str) -> dict[str, list[int]]:
    """Return the names of the tensors that are not bit-equal on all ranks, with the ranks that differ from rank 0.

    Equal on all ranks. Collective: yes.
    """
    everyone = comm.allgather(digests(tensors.values()).unsqueeze(0), name=name).wait()
    unequal = everyone != everyone[0]
    return {
        tensor: unequal[:, index].nonzero().view(-1).tolist()
        for index, tensor in enumerate(tensors)
        if bool(unequal[:, index].any())
    }


def check_equal(model: nn.Module, comm: Comm, *, name: str) -> dict[str, list[int]]:
    """Check that every parameter is bit-equal on all ranks. Collective: yes.

    Returns:
        Persistent buffers that differ, with the ranks on which they differ from rank 0.

    Errors:
        DriftError: on every rank, with the first parameter that differs and the ranks that differ from rank 0.
    """
    found = find_unequal(replicated(model), comm, name=name)
    parameters = dict(model.named_parameters())
    wrong = [tensor for tensor in found if tensor in parameters]
    if not wrong:
        return found
    ranks = sorted({rank for tensor in wrong for rank in found[tensor]})
    raise DriftError(
        f"parameters are not equal on all ranks: {wrong[0]} differs on rank(s) {', '.join(map(str, ranks))}",
        expected="bit-equal parameters after every step",
        next_step="possible causes: a forward pass that writes to parameters, or different CPUs or GPUs;"
        " resume from the last checkpoint with the same command",
    )
