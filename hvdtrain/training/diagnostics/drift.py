"""Detect parameters and buffers that differ between ranks; without an extra collective while training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hvdtrain.comm.base import Comm
from hvdtrain.errors import DriftError
from hvdtrain.state.divided import group_size, is_divided, local
from hvdtrain.state.frozen import changed
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.loop.buffers import persistent_buffers

_ROW_BYTES = 8192
_BITS = 16
"""Bits of a rank's hash: few enough that the sum of squares over a million ranks is exact in float64. Different tensors
have equal hashes once in 65,536 times; the next check finds them."""


@dataclass
class Drift:
    """A hash of this rank's parameters and persistent buffers, which some steps sum over ranks.

    N hashes are equal if ``N * sum(n^2) == sum(n)^2`` (Cauchy-Schwarz). All ranks have both sums, so they agree.

    If groups of N ranks divide parameters, rank i of each group has the same parts: there is one more hash for each i.

    Attributes:
        every: steps between two checks; 0 for none.
        share: makes buffers that differ equal.
    """

    state: TrainState
    comm: Comm
    every: int
    share: Callable[[Mapping[str, list[int]]], None]
    warn: Callable[[str], None]

    def __post_init__(self) -> None:
        """Find the groups."""
        self._groups = _group_sizes(self.state.model, self.comm.size)

    def values(self) -> list[int]:
        """Return this rank's hashes and their squares; zeros for those of others, and if no check is due."""
        found = [0] * (2 + 2 * sum(self._groups))
        if self.comm.size == 1 or not self.every or self.state.progress.step % self.every:
            return found
        if self.state.exchange is not None:
            self.state.exchange.complete()
        mine = tensors_hash(replicated(self.state.model))
        found[:2] = mine, mine * mine
        first = 2
        for group in self._groups:
            mine, place = tensors_hash(own_parts(self.state.model, group)), first + 2 * (self.comm.rank % group)
            found[place : place + 2] = mine, mine * mine
            first += 2 * group
        return found

    def on_sums(self, step: int, sums: Sequence[int]) -> None:
        """Check the state before step `step` by the sums. Collective: yes.

        Errors:
            DriftError: on every rank, with a parameter and the ranks, or with buffers that are only checked.
        """
        ranks = [self.comm.size, *(self.comm.size // group for group in self._groups for _ in range(group))]
        if any(n * squares != total * total for n, total, squares in zip(ranks, sums[::2], sums[1::2], strict=True)):
            found = check_equal(self.state.model, self.comm, name="drift/found")
            self.share(found)
            if not found:
                self.warn(f"parameters differed between ranks before step {step}, and are equal again after it")


def tensors_hash(tensors: Mapping[str, Tensor]) -> int:
    """Return a hash of `_BITS` bits of all tensors. Waits for the device."""
    found = digests(tensors.values())
    places = torch.arange(1, len(found) + 1, dtype=torch.int64) * 2654435761 + 97
    # Multiply by an odd number, so that the highest bits depend on all others (Knuth's multiplicative hashing).
    mixed = int((found * places).sum()) * 0x9E3779B97F4A7C15
    return (mixed >> (64 - _BITS)) & ((1 << _BITS) - 1)


def replicated(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that every rank has a copy of: parameters, then persistent buffers."""
    parameters = {name: p for name, p in model.named_parameters() if not is_divided(p)}
    return {**parameters, **persistent_buffers(model)}


def own_parts(model: nn.Module, group: int) -> dict[str, Tensor]:
    """Return this rank's parts of the parameters that groups of `group` ranks divide."""
    return {
        name: local(parameter)
        for name, parameter in model.named_parameters()
        if is_divided(parameter) and group_size(parameter) == group
    }


def _group_sizes(model: nn.Module, ranks: int) -> list[int]:
    """Return how many ranks divide a parameter, where several groups of ranks do; equal on all ranks."""
    sizes = {group_size(parameter) for parameter in model.parameters() if is_divided(parameter)}
    return sorted(size for size in sizes if size < ranks)


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


def check_frozen(state: TrainState) -> None:
    """Check that no parameter has changed that checkpoints leave out. The first call notes their values.

    Errors:
        TaskError: one has.
    """
    if state.frozen is None:
        return
    named = {name: local(p) for name, p in state.model.named_parameters() if name in state.frozen.names}
    found = digests(named.values())
    if state.frozen.hashes is None:
        state.frozen.hashes = found
    elif wrong := (found != state.frozen.hashes).nonzero().view(-1).tolist():
        raise changed([*named][wrong[0]], "training has changed it")


def find_unequal(tensors: Mapping[str, Tensor], comm: Comm, *, name: str, group: int = 1) -> dict[str, list[int]]:
    """Return the names of the tensors that are not bit-equal on all ranks, with the ranks that differ from rank 0.

    With a `group`, ranks of the same remainder are compared: rank 5 of groups of 4 with rank 1. Equal on all ranks.
    Collective: yes.
    """
    if comm.size == 1:
        return {}
    everyone = comm.allgather(digests(tensors.values()).unsqueeze(0), name=name).wait()
    unequal = everyone != everyone[torch.arange(comm.size) % group]
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
        DriftError: on every rank, with the first parameter that differs and the ranks that differ from rank 0, or from
            the rank of the first group with the same parts.
    """
    found = find_unequal(replicated(model), comm, name=name)
    for group in _group_sizes(model, comm.size):
        found |= find_unequal(own_parts(model, group), comm, name=name, group=group)
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
