"""Send pieces of a divided state from ranks that hold them to ranks that need them: packed, from owner to owner.

Each rank is the directory of some tensors, by a hash of their names: it learns who holds which piece of them, and who
needs which part. So no rank lists all pieces, and none needs memory for more than it asks for. The number of
collectives depends on the bytes that two ranks exchange, not on the numbers of pieces and ranks.
"""

from __future__ import annotations

import math
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import allgather_json, alltoall_json
from hvdtrain.state.pieces import DTYPES, Key, Part, Piece, StateDict, box_of, overlap

_WINDOW_BYTES = 64 << 20  # bytes that a rank sends, or receives, at the same time
_ALIGNMENT = 64


def gather_pieces(state: StateDict, comm: Comm) -> StateDict:
    """Return the whole tensors on rank 0, and the replicated ones on other ranks. Collective: yes."""
    tensors = {group: {**entries} for group, entries in state.replicated().tensors.items()}
    own = state.pieces(state.pieces_of(comm.rank))
    for (group, name), whole in fetch(own, lambda *_: None if comm.rank else ..., comm).items():
        if whole is not None:
            tensors.setdefault(group, {})[name] = whole
    return StateDict(tensors, state.values)


def fetch(
    own: Sequence[Piece],
    needs: Callable[[str, str, Sequence[int]], Part | None],
    comm: Comm,
    progress: Callable[[], None] = lambda: None,
) -> dict[Key, Tensor | None]:
    """Return what this rank needs of whole tensors, on the CPU; None for nothing. Collective: yes.

    `own`: pieces that this rank sends; those of all ranks are whole tensors. `needs`: returns the part of a tensor, by
    its group, name and shape. `progress`: called after each chunk.

    Errors: ValueError: on every rank, if pieces of a tensor are missing.
    """
    specs: list[list[Any]] = [[] for _ in range(comm.size)]
    for index, piece in enumerate(own):
        specs[_directory(piece.group, piece.name, comm)].append([*piece.spec(), index])
    listed: dict[Key, _Listed] = {}
    for holder, given in enumerate(alltoall_json(comm, specs, name="state/pieces")):
        for group, name, shape, dtype, whole, offset, index in given:
            listed.setdefault((group, name), _Listed(dtype, whole)).pieces.append((offset, shape, holder, index))
    every: dict[Key, None] = {}
    found: dict[Key, Tensor] = {}
    boxes: dict[Key, list[range]] = {}
    asked: list[list[Any]] = [[] for _ in range(comm.size)]
    tensors = [[*key, each.dtype, each.whole, each.missing] for key, each in listed.items()]
    for group, name, dtype, whole, missing in chain.from_iterable(allgather_json(comm, tensors, name="state/tensors")):
        if missing:
            raise ValueError(f"the pieces of {name} have {-missing:+} elements compared with the whole tensor")
        every[group, name] = None
        if (part := needs(group, name, whole)) is not None:
            boxes[group, name] = box = box_of(whole, part)
            found[group, name] = torch.empty([len(each) for each in box], dtype=DTYPES[dtype])
            asked[_directory(group, name, comm)].append([group, name, [[each.start, each.stop] for each in box]])
    orders: list[tuple[list[Any], list[Any]]] = [([], []) for _ in range(comm.size)]  # what a rank sends, and gets
    for rank, parts in enumerate(alltoall_json(comm, asked, name="state/asked")):
        for group, name, ends in parts:
            for holder, index, begin, size in listed[group, name].find([range(*each) for each in ends]):
                orders[holder][0].append([rank, index, begin, size])
                orders[rank][1].append([holder, group, name, begin, size])
    outgoing: list[list[Tensor]] = [[] for _ in range(comm.size)]
    coming: list[list[Tensor]] = [[] for _ in range(comm.size)]  # where it goes
    for sends, gets in alltoall_json(comm, orders, name="state/orders"):
        for rank, index, begin, size in sends:
            outgoing[rank].append(_part(own[index].tensor, begin, size, own[index].place.offset))
        for holder, group, name, begin, size in gets:
            starts = [each.start for each in boxes[group, name]]
            coming[holder].append(_part(found[group, name], begin, size, starts))
    for given, into in zip(outgoing[comm.rank], coming[comm.rank], strict=True):
        into.copy_(given)
    outgoing[comm.rank], coming[comm.rank] = [], []
    kinds = [[(into.shape, into.dtype) for into in parts] for parts in coming]
    received = send_packed(outgoing, kinds, comm, progress, name="state/parts")
    for parts in coming:
        for into, given in zip(parts, received.pop(0), strict=True):
            into.copy_(given)
    return {**every, **found}


@dataclass
class _Listed:
    """A tensor in a directory."""

    dtype: str
    whole: Sequence[int]  # its shape
    pieces: list[tuple[list[int], list[int], int, int]] = field(default_factory=list)  # offset, shape, holder, number

    @property
    def missing(self) -> int:
        """The elements that no piece has."""
        return math.prod(self.whole) - sum(math.prod(shape) for _, shape, _, _ in self.pieces)

    @cached_property
    def _ordered(self) -> tuple[list[int], int]:
        """The first rows of the pieces, in order, and the most rows of one."""
        self.pieces.sort()
        return [offset[0] for offset, *_ in self.pieces], max(shape[0] for _, shape, _, _ in self.pieces)

    def find(self, box: Sequence[range]) -> Iterator[tuple[int, int, list[int], list[int]]]:
        """Yield what pieces have of a part: rank, number of the piece there, begin in the whole tensor, and shape."""
        first, last = 0, len(self.pieces)
        if self.whole:
            rows, most = self._ordered
            first, last = bisect_left(rows, box[0].start - most + 1), bisect_left(rows, box[0].stop)
        for offset, shape, holder, index in self.pieces[first:last]:
            common = overlap(box, offset, shape)
            if all(common):
                yield holder, index, [each.start for each in common], [len(each) for each in common]


def send_packed(
    outgoing: Sequence[Sequence[Tensor]],
    kinds: Sequence[Sequence[tuple[Sequence[int], torch.dtype]]],
    comm: Comm,
    progress: Callable[[], None],
    *,
    name: str,
) -> list[list[Tensor]]:
    """Send tensors to each rank; return those of each rank, on the CPU. Collective: yes.

    `kinds`: shape and dtype of the tensors that each rank sends to this one. `progress`: called after each chunk.
    """
    sent = [sum(padded(tensor.nbytes) for tensor in tensors) for tensors in outgoing]
    incoming = [sum(padded(math.prod(shape) * dtype.itemsize) for shape, dtype in of_rank) for of_rank in kinds]
    partners = max(sum(map(bool, sent)), sum(map(bool, incoming)))
    facts = torch.tensor([[max(*sent, *incoming), partners]])
    longest, most = comm.allgather(facts, name=f"{name}/bytes").wait().amax(0).tolist()
    chunk = max(_WINDOW_BYTES // max(most, 1), _ALIGNMENT)
    streams = [_chunks(tensors, chunk) for tensors in outgoing]
    received = [torch.empty(count, dtype=torch.uint8) for count in incoming]
    for begin in range(0, longest, chunk):
        parts = [next(stream, torch.empty(0, dtype=torch.uint8)) for stream in streams]
        found = comm.alltoall(torch.cat(parts), name=name, rows=[len(part) for part in parts]).wait()
        lengths = [min(chunk, max(0, count - begin)) for count in incoming]
        for into, part in zip(received, torch.split(found, lengths), strict=True):
            into[begin : begin + len(part)] = part
        progress()
    return [[*_unpacked(packed, of_rank)] for packed, of_rank in zip(received, kinds, strict=True)]


def _unpacked(packed: Tensor, kinds: Iterable[tuple[Sequence[int], torch.dtype]]) -> Iterator[Tensor]:
    for shape, dtype in kinds:
        nbytes = math.prod(shape) * dtype.itemsize
        yield packed[:nbytes].view(dtype).reshape(shape)
        packed = packed[padded(nbytes) :]


def padded(nbytes: int) -> int:
    """Return the bytes that a tensor takes in a buffer of several."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _chunks(tensors: Iterable[Tensor], length: int) -> Iterator[Tensor]:
    """Yield the padded bytes of the tensors, in chunks of `length` bytes on the CPU."""
    parts: list[Tensor] = []
    done = 0
    for tensor in tensors:
        flat = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
        for part in (flat, torch.zeros(padded(len(flat)) - len(flat), dtype=torch.uint8)):
            while len(part):
                parts.append(part[: length - done])
                done, part = done + len(parts[-1]), part[len(parts[-1]) :]
                if done == length:
                    yield torch.cat(parts)
                    parts, done = [], 0
    if parts:
        yield torch.cat(parts)


def _directory(group: str, name: str, comm: Comm) -> int:
    return zlib.crc32(f"{group}/{name}".encode()) % comm.size


def _part(piece: Tensor, begin: Sequence[int], size: Sequence[int], offset: Sequence[int]) -> Tensor:
    """Return the part of a piece at `offset` that begins, in the whole tensor, at `begin`."""
    return piece[tuple(slice(b - o, b - o + n) for b, n, o in zip(begin, size, offset, strict=True))]
