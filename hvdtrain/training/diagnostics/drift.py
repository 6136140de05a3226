"""Detect parameters and buffers that differ between ranks; without an extra collective while training."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import allgather_json
from hvdtrain.engine.base import Engine
from hvdtrain.errors import DriftError
from hvdtrain.state.divided import Cut, is_divided, local, share_count, share_of, shares
from hvdtrain.state.frozen import changed
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.loop.buffers import persistent_buffers
from hvdtrain.training.loop.step_part import StepPart

_ROW_BYTES = 8192
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
_BITS = 16
"""Bits of a rank's hash: few enough that the sum of squares over a million ranks is exact in float64. Different tensors
have equal hashes once in 65,536 times; the next check finds them."""


@dataclass
class Drift:
    """A hash of this rank's parameters and persistent buffers, which some steps sum over ranks.

    N hashes are equal if ``N * sum(n^2) == sum(n)^2`` (Cauchy-Schwarz). All ranks have both sums, so they agree.

    If groups of ranks divide parameters, there is one more hash for each part that several ranks have.
    """

    state: TrainState
    comm: Comm
    every: int  # steps between two checks; 0 for none
    share: Callable[[Mapping[str, list[int]]], None]  # makes buffers that differ equal
    warn: Callable[[str], None]

    def __post_init__(self) -> None:
        """Find out how ranks share parameters. Collective: yes."""
        self._divisions = _divisions(self.state.model, self.comm)
        self._ranks = [self.comm.size]  # with each hash
        for divided in self._divisions:
            counts = Counter(share_of(rank, divided) for rank in range(self.comm.size))
            self._ranks += [counts[share] for share in range(share_count(divided))]

    def values(self) -> list[int]:
        """Return this rank's hashes and their squares; zeros for those of others, and if no check is due."""
        found = [0] * (2 * len(self._ranks))
        step = self.state.progress.step
        is_first = step == 1 and bool(self._divisions)  # a plan that leaves out a parameter shows at once
        if self.comm.size == 1 or not self.every or (step % self.every and not is_first):
            return found
        if self.state.exchange is not None:
            self.state.exchange.complete()
        mine = tensors_hash(replicated(self.state.model))
        found[:2] = mine, mine * mine
        first = 2
        for divided in self._divisions:
            place = first + 2 * share_of(self.comm.rank, divided)
            mine = tensors_hash(own_parts(self.state.model, divided))
            found[place : place + 2] = mine, mine * mine
            first += 2 * share_count(divided)
        return found

    def on_sums(self, step: int, sums: Sequence[int]) -> None:
        """Check the state before step `step` by the sums. Collective: yes.

        Errors: DriftError: on every rank, with a parameter and the ranks, or with buffers that are only checked.
        """
        every = zip(self._ranks, sums[::2], sums[1::2], strict=True)
        if any(n * squares != total * total for n, total, squares in every):
            found = check_equal(self.state.model, self.comm, name="drift/found")
            self.share(found)
            if not found:
                self.warn(f"parameters differed between ranks before step {step}, and are equal again after it")


def tensors_hash(tensors: Mapping[str, Tensor]) -> int:
    """Return a hash of `_BITS` bits of all tensors. Waits for the device."""
    found = digests(tensors.values())
    places = 2 * torch.arange(len(found), dtype=torch.int64) + 1
    # Multiply by an odd number, so that the highest bits depend on all others (Knuth's multiplicative hashing).
    mixed = int((found * places).sum()) * _ODD
    return (mixed >> (64 - _BITS)) & ((1 << _BITS) - 1)


def replicated(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that every rank has a copy of: parameters, then persistent buffers."""
    parameters = {name: p for name, p in model.named_parameters() if not is_divided(p)}
    return {**parameters, **persistent_buffers(model)}


def own_parts(model: nn.Module, divided: tuple[Cut, ...]) -> dict[str, Tensor]:
    """Return this rank's parts of the parameters that are divided in a way."""
    return {
        name: local(parameter)
        for name, parameter in model.named_parameters()
        if is_divided(parameter) and shares(parameter) == divided
    }


def _divisions(model: nn.Module, comm: Comm) -> list[tuple[Cut, ...]]:
    """Return how ranks share parameters, where several have the same part; equal on all ranks.

    Collective: yes, if ranks divide the model.
    """
    own = {shares(parameter) for parameter in model.parameters() if is_divided(parameter)}
    everyone = allgather_json(comm, sorted(own), name="drift/divisions") if own else []
    found = {tuple(Cut(*cut) for cut in divided) for each in everyone for divided in each}
    return sorted(divided for divided in found if share_count(divided) < comm.size)


def digests(tensors: Iterable[Tensor]) -> Tensor:
    """Return a hash of each tensor's bits: (N,) int64 on the CPU."""
    numbers = [digest(tensor) for tensor in tensors]
    return torch.stack(numbers).cpu() if numbers else torch.zeros(0, dtype=torch.int64)


def digest(tensor: Tensor) -> Tensor:
    """Return a hash of a tensor's bits: int64, a scalar on its device. Another bit always gives another hash."""
    bits = tensor.detach().contiguous().flatten().view(torch.uint8)
    if bits.storage_offset() % 8:  # a slice of a flat buffer; eight bytes are read at a time
        bits = bits.clone()
    whole = len(bits) // _ROW_BYTES * _ROW_BYTES
    # A sum of rows; its columns are mixed with their positions, so that a swap of two elements shows. Modulo 2^64.
    columns = bits[:whole].view(torch.int64).view(-1, _ROW_BYTES // 8).sum(dim=0)
    if whole < len(bits):
        rest = nn.functional.pad(bits[whole:], (0, -(len(bits) - whole) % 8)).view(torch.int64)
        columns[: len(rest)] += rest
    places = torch.arange(len(columns), dtype=torch.int64, device=columns.device)
    mixed = (columns + places * 0x1B873593) * _ODD  # each step is one to one: an odd factor keeps the highest bit
    return ((mixed ^ (mixed >> 32 & 0xFFFFFFFF)) * _ODD).sum()


def check_frozen(state: TrainState) -> None:
    """Check that no parameter has changed that checkpoints leave out. The first call notes their values.

    Errors: TaskError: one has.
    """
    if state.frozen is None:
        return
    named = {name: local(p) for name, p in state.model.named_parameters() if name in state.frozen.names}
    found = digests(named.values())
    if state.frozen.hashes is None:
        state.frozen.hashes = found
    elif wrong := (found != state.frozen.hashes).nonzero().view(-1).tolist():
        raise changed([*named][wrong[0]], "training has changed it")


def find_unequal(
    tensors: Mapping[str, Tensor], comm: Comm, *, name: str, divided: tuple[Cut, ...] = ()
) -> dict[str, list[int]]:
    """Return the names of the tensors that are not bit-equal on all ranks, with the ranks that differ from rank 0.

    If they are `divided`, each rank is compared with the first one that has the same part. Equal on all ranks.
    Collective: yes.
    """
    if comm.size == 1:
        return {}
    found, names = digests(tensors.values()), crc32(json.dumps([*tensors]).encode())
    first: dict[int, int] = {}
    alike = [first.setdefault(share_of(rank, divided), rank) for rank in range(comm.size)]
    if len(set(comm.allgather(torch.tensor([names]), name=f"{name}/names").wait().tolist())) == 1:
        everyone = comm.allgather(found.unsqueeze(0), name=name).wait()
        unequal = everyone != everyone[alike]
        ranks = {tensor: unequal[:, index].nonzero().view(-1).tolist() for index, tensor in enumerate(tensors)}
    else:  # stages divide other tensors
        named = allgather_json(comm, dict(zip(tensors, found.tolist(), strict=True)), name=name)
        every = dict.fromkeys(tensor for mine in named for tensor in mine)
        ranks = {t: [r for r, other in enumerate(alike) if named[r].get(t) != named[other].get(t)] for t in every}
    return {tensor: differing for tensor, differing in ranks.items() if differing}


def check_equal(model: nn.Module, comm: Comm, *, name: str) -> dict[str, list[int]]:
    """Check that every parameter is bit-equal on all ranks. Collective: yes.

    Returns persistent buffers that differ, with the ranks on which they differ from rank 0.

    Errors: DriftError: on every rank, with the first parameter that differs and the ranks that differ from rank 0, or
    from the first rank with the same part.
    """
    found = find_unequal(replicated(model), comm, name=name)
    for divided in _divisions(model, comm):
        found |= find_unequal(own_parts(model, divided), comm, name=name, divided=divided)
    parameters = dict(model.named_parameters())
    wrong = [tensor for tensor in found if tensor in parameters]
    if not wrong:
        return found
    ranks = sorted({rank for tensor in wrong for rank in found[tensor]})
    raise DriftError(
        f"parameters are not equal on all ranks: {wrong[0]} differs on rank(s) {', '.join(map(str, ranks))}",
        expected="bit-equal parameters after every step",
        next_step="possible causes: a forward pass that writes to parameters, different CPUs or GPUs, or a model that"
        " --parallel.tp cannot divide (hvdtrain verify plan shows it); resume from the last checkpoint with the same"
        " command",
    )


MOST_PASSES = 64
"""Hashes of passes in the line of a step."""


def pass_hashes(numbers: Sequence[Sequence[float]]) -> str:
    """Return a hash of the loss and the weight of each pass, by position: eight hexadecimal digits each.

    If a step has more than `MOST_PASSES`, neighbours have one together, equally many except in the last.
    """
    each = -(-len(numbers) // MOST_PASSES)
    rows = [array("d", row).tobytes() for row in numbers]
    return "".join(f"{crc32(b''.join(rows[first : first + each])):08x}" for first in range(0, len(rows), each))


class ParameterHashes(StepPart):
    """Records after every `every` steps a hash of each tensor that all ranks have, eight hexadecimal digits each.

    Args:
        record: records an event; None on ranks that do not record.
    """

    def __init__(self, every: int, model: nn.Module, engine: Engine, record: Callable[[Any], None] | None) -> None:
        self._every, self._model, self._engine, self._record = every, model, engine, record
        self._names: list[str] = []

    def finish(self, step: int, *, applied: bool) -> None:
        """Record those after step `step`, if it is their turn; with the names, where these are others than before."""
        if step % self._every:
            return
        self._engine.complete()
        tensors = replicated(self._model)
        if self._record is None or not tensors:
            return
        names, self._names = self._names, [*tensors]
        facts = {} if names == self._names else {"names": self._names}
        hashes = "".join(f"{number & 0xFFFFFFFF:08x}" for number in digests(tensors.values()).tolist())
        self._record({"event": "parameters", "at_step": step, **facts, "hashes": hashes})
