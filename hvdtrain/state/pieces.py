"""A state in pieces: each rank holds whole tensors, or boxes of tensors that are divided among ranks.

Tensors have names with and without what a task adds that compiles or wraps its model: torch.compile adds `_orig_mod`
anywhere in a name; DataParallel and the like add `module.` to the begin of each.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import EllipsisType
from typing import Any, TypeVar

import torch
from torch import Tensor

from hvdtrain.state.stored_file import StoredTensor

Key = tuple[str, str]  # the group and the name of a tensor
Box = list[range]  # of a tensor, for each dimension
Spec = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of a tensor


@dataclass(frozen=True)
class Part:
    """A part of a whole tensor."""

    boxes: Sequence[Box]  # as their elements follow each other in the part
    size: tuple[int, ...]  # its shape

    def of(self, whole: Tensor | Whole) -> Tensor:
        """Return this part; a view if it is a box of a tensor in memory."""
        found = [whole[tuple(slice(each.start, each.stop) for each in box)] for box in self.boxes]
        return (torch.cat([each.reshape(-1) for each in found]) if found[1:] else found[0]).reshape(self.size)

    def views(self, tensor: Tensor) -> Iterator[tuple[Box, Tensor]]:
        """Yield the boxes, and their views in a tensor that is this part; its memory has no gaps if there are many."""
        begin, several = 0, len(self.boxes) > 1
        for box in self.boxes:
            size = [len(each) for each in box]
            end = begin + math.prod(size)
            yield box, tensor.view(-1)[begin:end].view(size) if several else tensor.view(size)
            begin = end


@dataclass(frozen=True)
class Place:
    """The place of a piece that not every rank holds: a box of a tensor, or elements of a box.

    Elements have one dimension. They follow each other in the box; its last dimension is the innermost.
    """

    shape: tuple[int, ...]  # of the whole tensor
    offset: tuple[int, ...]  # of the box's first element, for each dimension
    ranks: tuple[int, ...]  # ranks that hold equal copies of the piece, ascending
    box: tuple[int, ...] = ()  # shape of the box that the piece has elements of; empty if it is the box
    first: int = 0  # number of the first of these elements in the box

    def part(self, size: Sequence[int]) -> Part:
        """Return which part of the whole tensor the piece is, if its shape is `size`."""
        inside = _boxes(self.box, self.first, self.first + size[0]) if self.box else [[range(n) for n in size]]
        moved = [
            [range(at + each.start, at + each.stop) for at, each in zip(self.offset, box, strict=True)]
            for box in inside
        ]
        return Part(moved, tuple(size))

    def cut(self, whole: Tensor | Whole, size: Sequence[int]) -> Tensor:
        """Return the piece, of shape `size`; a view if it is a box of a tensor in memory."""
        return self.part(size).of(whole)


def _boxes(shape: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    """Yield the boxes of the elements from `begin` to before `end` of a tensor, in their order."""
    if len(shape) == 1:
        yield [range(begin, end)]
        return
    row = math.prod(shape[1:])
    while begin < end:
        index, inside = divmod(begin, row)
        if not inside and (rows := (end - begin) // row):
            yield [range(index, index + rows), *map(range, shape[1:])]
            begin += rows * row
            continue
        after = min(end, begin - inside + row)
        for box in _boxes(shape[1:], inside, inside + after - begin):
            yield [range(index, index + 1), *box]
        begin = after


@dataclass(frozen=True)
class Piece:
    """A piece that not every rank holds."""

    group: str
    name: str
    tensor: Tensor
    place: Place

    @property
    def is_nothing(self) -> bool:
        """Whether it has none of the tensor's elements, though there are some."""
        return not self.tensor.numel() and bool(math.prod(self.place.shape))

    @property
    def writer(self) -> int:
        """The rank that writes it to a checkpoint: one of those that hold it, so that all write about as much."""
        ranks, key = self.place.ranks, (self.group, self.name, self.place.offset, self.place.first)
        return ranks[zlib.crc32(repr(key).encode()) % len(ranks)]

    def boxes(self) -> Iterator[Piece]:
        """Yield the boxes of the whole tensor that it consists of, in the same memory."""
        place = self.place
        if not place.box:
            yield self
            return
        for box, view in place.part(self.tensor.shape).views(self.tensor.detach()):
            yield replace(self, tensor=view, place=Place(place.shape, tuple(each.start for each in box), place.ranks))

    def spec(self) -> list[Any]:
        """Return group, name, shape, dtype, shape of the whole tensor, and offset, of a box, for JSON."""
        place = self.place
        return [self.group, self.name, list(self.tensor.shape), str(self.tensor.dtype), place.shape, place.offset]


DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
"""By name, such as ``torch.float32``."""


@dataclass(frozen=True)
class StateDict:
    """The pieces of a state that one rank holds, and plain values that JSON supports.

    `tensors`: {"model": {name: tensor}, "optimizer": {"name/slot": tensor}, "exchange": {"name/kind": tensor},
    "callbacks": {"callback/name": tensor}}; the last two only if they are not empty. ``optimizer_values`` holds numbers
    of a divided optimizer's state, by ``name/slot``, as tensors without dimensions.
    `places`: of the pieces; a tensor without a place is whole, and equal on all ranks.
    """

    tensors: Mapping[str, Mapping[str, Tensor]]
    values: Mapping[str, Any]  # equal on all ranks
    places: Mapping[Key, Place] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Number of tensors in all groups."""
        return sum(len(tensors) for tensors in self.tensors.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensors in self.tensors.values() for tensor in tensors.values())

    def pieces_of(self, rank: int) -> list[Piece]:
        """Return the pieces that `rank`, which this is, writes: not copies of another rank's, and no empty ones."""
        return [piece for piece in self.pieces() if piece.writer == rank and not piece.is_nothing]

    def pieces(self) -> list[Piece]:
        """Return all pieces."""
        return [Piece(*key, self.tensors[key[0]][key[1]], place) for key, place in self.places.items()]

    def replicated(self) -> StateDict:
        """Return the state without the pieces that only some ranks hold."""
        tensors = {
            group: {name: tensor for name, tensor in entries.items() if (group, name) not in self.places}
            for group, entries in self.tensors.items()
        }
        return StateDict(tensors, self.values)

    def with_parts(self, parts: Mapping[Key, Tensor | None]) -> StateDict:
        """Return the state with these instead of the pieces."""
        tensors: dict[str, dict[str, Tensor]] = {group: {**own} for group, own in self.replicated().tensors.items()}
        for (group, name), part in parts.items():
            if part is not None:
                tensors.setdefault(group, {})[name] = part
        return StateDict(tensors, self.values)


W = TypeVar("W", bound="Tensor | Whole")


class Whole:
    """A whole tensor in pieces: only those that a part needs are read."""

    def __init__(self, pieces: Sequence[tuple[Place, Tensor | StoredTensor]]) -> None:
        self.pieces = pieces
        self.shape, self.dtype = pieces[0][0].shape, pieces[0][1].dtype

    def __getitem__(self, part: tuple[slice, ...] | EllipsisType) -> Tensor:
        """Return a box of it; an ellipsis for all of it."""
        place, piece = self.pieces[0]
        if tuple(piece.shape) == place.shape:
            return piece[part]
        wanted = [range(n) for n in self.shape]
        if part is not ...:
            wanted = [every[each] for every, each in zip(wanted, part, strict=True)]
        made = torch.empty([len(each) for each in wanted], dtype=self.dtype)
        for place, piece in self.pieces:
            common = overlap(wanted, place.offset, piece.shape)
            if all(common):
                to = tuple(slice(c.start - a.start, c.stop - a.start) for c, a in zip(common, wanted, strict=True))
                source = tuple(slice(c.start - b, c.stop - b) for c, b in zip(common, place.offset, strict=True))
                made[to].copy_(piece[source])
        return made


def overlap(box: Box, offset: Iterable[int], size: Iterable[int]) -> Box:
    """Return which part of a box a piece at `offset` has; a range is empty if it has none."""
    held = (range(begin, begin + n) for begin, n in zip(offset, size, strict=True))
    return [range(b := max(x.start, y.start), max(b, min(x.stop, y.stop))) for x, y in zip(box, held, strict=True)]


class Assembly(Mapping[str, Tensor]):
    """Whole tensors from pieces on the CPU. Each access puts one together, so that they need not fit into memory."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[tuple[Place, Tensor | StoredTensor]]] = {}

    def add(self, name: str, piece: Tensor | StoredTensor, shape: Iterable[int], offset: Iterable[int]) -> None:
        """Add a piece of the tensor `name` of shape `shape`.

        Errors: ValueError: it does not fit into the tensor, or does not fit to the other pieces.
        """
        place = Place(tuple(shape), tuple(offset), ())
        first_place, first = self._pieces.setdefault(name, [(place, piece)])[0]
        ends = [begin + size for begin, size in zip(place.offset, piece.shape, strict=True)]
        inside = min(place.offset, default=0) >= 0 and all(e <= s for e, s in zip(ends, place.shape, strict=True))
        if not inside or (first_place.shape, first.dtype) != (place.shape, piece.dtype):
            raise ValueError(f"a piece of {name} at {list(offset)} does not fit into shape {list(first_place.shape)}")
        if first is not piece:
            self._pieces[name].append((place, piece))

    def check(self) -> None:
        """Check that all tensors are whole. Errors: ValueError if one lacks pieces, or has pieces twice."""
        for name, pieces in self._pieces.items():
            extra = sum(piece.numel() for _, piece in pieces) - math.prod(pieces[0][0].shape)
            if extra:
                raise ValueError(f"the pieces of {name} have {extra:+} elements compared with the whole tensor")

    def __getitem__(self, name: str) -> Tensor:
        return self.whole(name)[...]

    def whole(self, name: str) -> Whole:
        """Return a tensor, still unread."""
        return Whole(self._pieces[name])

    def renamed(self, rename: Callable[[str], str]) -> Assembly:
        """Return the same tensors under other names."""
        found = Assembly()
        found._pieces = {rename(name): pieces for name, pieces in self._pieces.items()}
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)


def lazily(tensors: Mapping[str, Tensor], name: str) -> Tensor | Whole:
    """Return a tensor; if it is in pieces, without reading it."""
    return tensors.whole(name) if isinstance(tensors, Assembly) else tensors[name]


def specs(tensors: Mapping[str, Tensor]) -> dict[str, Spec]:
    """Return shape and dtype of each tensor, without putting it together from pieces."""
    if isinstance(tensors, Assembly):
        return {name: (pieces[0][0].shape, pieces[0][1].dtype) for name, pieces in tensors._pieces.items()}
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Return, for each name, the one without what compiling and wrapping adds; itself if two would be equal."""
    found = {name: ".".join(part for part in name.split(".") if part != "_orig_mod") for name in names}
    while found and all(name.startswith("module.") for name in found.values()):
        found = {name: plain.removeprefix("module.") for name, plain in found.items()}
    return found if len({*found.values()}) == len(found) else {name: name for name in found}


def named_like(state: StateDict, own: Iterable[str]) -> StateDict:
    """Return a state of whole tensors under the names of the own model, which may be compiled or wrapped otherwise."""
    plain, stored = plain_names(own), {*state.tensors["model"], *state.values["aliases"]}
    if stored <= plain.keys():
        return state
    by_plain = {short: name for name, short in plain.items()}
    names = {name: by_plain.get(short, name) for name, short in plain_names(stored).items()}

    def renamed(key: str, group: str = "") -> str:
        if group.startswith("optimizer"):  # the last part is a slot, which may have the name of a parameter
            name, _, slot = key.rpartition("/")
            return f"{names.get(name, name)}/{slot}"
        return "/".join(names.get(part, part) for part in key.split("/"))

    def renamed_value(value: Any, group: str) -> Any:
        if isinstance(value, Mapping):
            return {renamed(key, group): renamed_value(each, "") for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [renamed_value(each, "") for each in value]
        return renamed(value) if isinstance(value, str) else value

    tensors: dict[str, Any] = {}
    for group, entries in state.tensors.items():
        if isinstance(entries, Assembly):
            tensors[group] = entries.renamed(partial(renamed, group=group))
        else:
            tensors[group] = {renamed(key, group): tensor for key, tensor in entries.items()}
    with_names = {key: renamed_value(state.values[key], key) for key in _WITH_NAMES if key in state.values}
    return StateDict(tensors, {**state.values, **with_names})


_WITH_NAMES = ("aliases", "optimizer", "exchange", "callbacks")  # the keys of values that have names of tensors
