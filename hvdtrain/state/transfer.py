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
from itertools import chain
from types import EllipsisType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import allgather_json, alltoall_json
from hvdtrain.state.pieces import DTYPES, Box, Key, Part, Piece, StateDict, overlap

_WINDOW_BYTES = 64 << 20  # bytes that a rank sends, or receives, at the same time
_ALIGNMENT = 64


def gather_pieces(state: StateDict, comm: Comm) -> StateDict:
    """Return the whole tensors on rank 0, and the replicated ones on other ranks. Collective: yes."""
    return state.with_parts(fetch(state.pieces_of(comm.rank), lambda *_: None if comm.rank else ..., comm))


def fetch(
    own: Sequence[Piece],
    needs: Callable[[str, str, Sequence[int]], Part | EllipsisType | None],
    comm: Comm,
    progress: Callable[[], None] = lambda: None,
) -> dict[Key, Tensor | None]:
    """Return what this rank needs of whole tensors, on the CPU; None for nothing. Collective: yes.

    `own`: pieces that this rank sends; those of all ranks are whole tensors. `needs`: returns the part of a tensor, by
    its group, name and shape, as of `TrainState.held_part`. `progress`: called after each chunk.

    Errors: ValueError: on every rank, if pieces of a tensor are missing, or do not fit together.
    """
    own = [box for piece in own for box in piece.boxes()]
    specs: list[list[Any]] = [[] for _ in range(comm.size)]
    for index, piece in enumerate(own):
        specs[_directory(piece.group, piece.name, comm)].append([*piece.spec(), index])
    listed: dict[Key, list[_Listed]] = {}
    for holder, given in enumerate(alltoall_json(comm, specs, name="state/pieces")):
        for group, name, shape, dtype, whole, offset, index in given:
            listed.setdefault((group, name), []).append(_Listed(offset, shape, dtype, whole, holder, index))
    every: dict[Key, None] = {}
    found: dict[Key, Tensor] = {}
    views: dict[Key, list[tuple[Box, Tensor]]] = {}
    asked: list[list[Any]] = [[] for _ in range(comm.size)]
    tensors = [[*key, pieces[0].dtype, pieces[0].whole, _wrong(pieces)] for key, pieces in listed.items()]
    for group, name, dtype, whole, wrong in chain.from_iterable(allgather_json(comm, tensors, name="state/tensors")):
        if wrong:
            raise ValueError(f"the pieces of {name} {wrong}")
        every[group, name] = None
        if (part := needs(group, name, whole)) is not None:
            part = Part([[*map(range, whole)]], tuple(whole)) if part is ... else part
            found[group, name] = made = torch.empty(part.size, dtype=DTYPES[dtype])
            views[group, name] = [*part.views(made)]
            ends = [[[each.start, each.stop] for each in box] for box in part.boxes]
            asked[_directory(group, name, comm)].append([group, name, ends])
    orders: list[tuple[list[Any], list[Any]]] = [([], []) for _ in range(comm.size)]  # what a rank sends, and gets
    for rank, parts in enumerate(alltoall_json(comm, asked, name="state/asked")):
        for group, name, boxes in parts:
            for number, ends in enumerate(boxes):
                for each, common in _overlapping(listed[group, name], [range(*end) for end in ends]):
                    begin, size = [rows.start for rows in common], [len(rows) for rows in common]
                    orders[each.holder][0].append([rank, each.number, begin, size])
                    orders[rank][1].append([each.holder, group, name, number, begin, size])
    outgoing: list[list[Tensor]] = [[] for _ in range(comm.size)]
    coming: list[list[Tensor]] = [[] for _ in range(comm.size)]  # where it goes
    for sends, gets in alltoall_json(comm, orders, name="state/orders"):
        for rank, index, begin, size in sends:
            outgoing[rank].append(_part(own[index].tensor.detach(), begin, size, own[index].place.offset))
        for holder, group, name, number, begin, size in gets:
            box, view = views[group, name][number]
            coming[holder].append(_part(view, begin, size, [each.start for each in box]))
    for given, into in zip(outgoing[comm.rank], coming[comm.rank], strict=True):
        into.copy_(given)
    outgoing[comm.rank], coming[comm.rank] = [], []
    kinds = [[(into.shape, into.dtype) for into in parts] for parts in coming]
    received = send_packed(outgoing, kinds, comm, progress, name="state/parts")
    for parts in coming:
        for into, given in zip(parts, received.pop(0), strict=True):
            into.copy_(given)
    return {**every, **found}


class _Listed(NamedTuple):  # a piece in a directory
    offset: list[int]
    shape: list[int]
    dtype: str
    whole: list[int]  # shape of the tensor
    holder: int
    number: int  # there


def _wrong(pieces: list[_Listed]) -> str:
    """Sort the pieces of a tensor; return what is wrong with them, or ""."""
    pieces.sort()
    extra = sum(math.prod(piece.shape) for piece in pieces) - math.prod(pieces[0].whole)
    inside = all(0 <= b <= e - n for each in pieces for b, n, e in zip(*each[:2], each.whole, strict=True))
    if not inside or len({(each.dtype, *each.whole) for each in pieces}) > 1:
        return "do not fit together"
    return f"have {extra:+} elements compared with the whole tensor" if extra else ""


def _overlapping(pieces: list[_Listed], box: Box) -> Iterator[tuple[_Listed, Box]]:
    """Yield the pieces that have some of a part, and which."""
    low, high = 0, len(pieces)
    if box:
        begin = box[0].start - max(piece.shape[0] for piece in pieces) + 1
        low, high = (bisect_left(pieces, row, key=lambda piece: piece.offset[0]) for row in (begin, box[0].stop))
    for piece in pieces[low:high]:
        common = overlap(box, piece.offset, piece.shape)
        if all(common):
            yield piece, common


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
    chunk = _WINDOW_BYTES
    while chunk > _ALIGNMENT and any(sum(min(chunk, n) for n in all_) > _WINDOW_BYTES for all_ in (sent, incoming)):
        chunk //= 2
    facts = torch.tensor([[max(*sent, *incoming), -chunk]])
    longest, chunk = comm.allgather(facts, name=f"{name}/bytes").wait().amax(0).abs().tolist()
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
