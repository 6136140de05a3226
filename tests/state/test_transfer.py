"""Pieces go from ranks that hold them to ranks that need them, and nothing else does."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hvdtrain.state import transfer
from hvdtrain.state.pieces import Piece, Place
from hvdtrain.state.transfer import fetch, padded
from tests.support.thread_comm import ThreadComm, ThreadHandle, on_ranks


class Counting(ThreadComm):
    """Counts collectives, and the bytes of pieces that others send to this rank."""

    def __init__(self, comm: ThreadComm) -> None:
        super().__init__(comm._hub, comm.rank)
        self.calls = self.got_bytes = 0

    def _start(self, kind: str, name: str, part: Any, result: Any) -> ThreadHandle:
        self.calls += 1

        def counted(parts: list[Any]) -> Tensor:
            if kind == "all" and name == "state/parts":
                self.got_bytes += sum(p[self.rank].nbytes for rank, p in enumerate(parts) if rank != self.rank)
            made: Tensor = result(parts)
            return made

        return super()._start(kind, name, part, counted)


def _piece(name: str, whole: Tensor, offset: tuple[int, ...], size: tuple[int, ...]) -> Piece:
    place = Place(tuple(whole.shape), offset, ())
    return Piece("group", name, place.cut(whole, size), place)


@st.composite
def _cases(draw: st.DrawFn) -> tuple[int, int, list[Tensor], list[tuple[int, Piece]], list[tuple[int, list[range]]]]:
    """Ranks, bytes at a time, whole tensors, pieces with their holders, and for each rank a tensor and a part of it."""
    size = draw(st.integers(1, 4))
    wholes, held, wanted = [], [], []
    for number in range(draw(st.integers(1, 3))):
        shape = draw(st.lists(st.integers(0, 7), max_size=3))
        dtype = draw(st.sampled_from([torch.float32, torch.int64, torch.bfloat16]))
        whole = (torch.arange(prod(shape)).reshape(shape) + number).to(dtype)
        wholes.append(whole)
        dim = draw(st.integers(0, len(shape) - 1)) if shape else 0  # of rows, or of columns
        length = shape[dim] if shape else 0
        cuts = sorted({0, *draw(st.lists(st.integers(0, length), max_size=3)), length})
        for begin, end in [*pairwise(cuts)] or [(0, length)]:
            offset, part = [0] * len(shape), [*shape]
            if shape:
                offset[dim], part[dim] = begin, end - begin
            held.append((draw(st.integers(0, size - 1)), _piece(f"t{number}", whole, tuple(offset), tuple(part))))
    for _ in range(size):
        number = draw(st.integers(0, len(wholes) - 1))
        bounds = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in wholes[number].shape]
        wanted.append((number, [range(*each) for each in bounds]))
    return size, draw(st.sampled_from([64, 200, 1 << 20])), wholes, held, wanted


@given(_cases())
def test_each_rank_gets_what_it_asks_for_and_no_more(case: Any) -> None:
    size, window, wholes, held, wanted = case

    def body(comm: ThreadComm) -> None:
        counting, (number, box) = Counting(comm), wanted[comm.rank]
        part = tuple(slice(each.start, each.stop) for each in box)
        own = [piece for holder, piece in held if holder == comm.rank]
        found = fetch(own, lambda _, name, shape: part if name == f"t{number}" else None, counting)
        assert found.keys() == {("group", f"t{each}") for each in range(len(wholes))}
        mine = found.pop(("group", f"t{number}"))
        assert mine is not None and torch.equal(mine, wholes[number][part])
        assert all(other is None for other in found.values())
        assert counting.got_bytes <= padded(mine.nbytes) + 64 * len(held)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "_WINDOW_BYTES", window)
        on_ranks(size, body)


@pytest.mark.parametrize("pieces", [4, 400])
def test_the_number_of_collectives_does_not_grow_with_that_of_pieces(pieces: int) -> None:
    def body(comm: ThreadComm) -> int:
        counting, whole = Counting(comm), torch.arange(float(pieces))
        own = [_piece("t", whole, (number,), (1,)) for number in range(comm.rank, pieces, comm.size)]
        (found,) = fetch(own, lambda *_: ... if comm.rank == 3 else None, counting).values()
        assert (found is None) == (comm.rank != 3) and (found is None or torch.equal(found, whole))
        return counting.calls

    assert set(on_ranks(4, body)) == {10}


def test_a_missing_piece_is_an_error_on_every_rank() -> None:
    def body(comm: ThreadComm) -> None:
        own = [_piece("t", torch.ones(4, 3), (0, 0), (2, 3))] if comm.rank == 0 else []
        with pytest.raises(ValueError, match="t have -6 elements"):
            fetch(own, lambda *_: None, comm)

    on_ranks(2, body)
