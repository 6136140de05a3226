"""Pieces go from ranks that hold them to ranks that need them, and nothing else does."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hvdtrain.state import transfer
from hvdtrain.state.pieces import Part, Piece, Place
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


def _flat_piece(name: str, whole: Tensor, offset: tuple[int, ...], box: tuple[int, ...], ends: range) -> Piece:
    place = Place(tuple(whole.shape), offset, (), box, ends.start)
    return Piece("group", name, place.cut(whole, (len(ends),)).clone(), place)


@st.composite
def _cases(draw: st.DrawFn) -> tuple[int, int, list[Tensor], list[tuple[int, Piece]], list[tuple[int, Part, Tensor]]]:
    """Ranks, bytes at a time, whole tensors, pieces with their holders, and for each rank a tensor and a part of it.

    Pieces and parts are boxes, or elements of boxes.
    """
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
            made = [_piece(f"t{number}", whole, tuple(offset), tuple(part))]
            if (count := prod(part)) > 1 and draw(st.booleans()):
                middle = draw(st.integers(1, count - 1))
                flat = partial(_flat_piece, f"t{number}", whole, tuple(offset), tuple(part))
                made = [flat(range(middle)), flat(range(middle, count))]
            held += [(draw(st.integers(0, size - 1)), piece) for piece in made]
    for _ in range(size):
        number = draw(st.integers(0, len(wholes) - 1))
        whole = wholes[number]
        bounds = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in whole.shape]
        offset, box = tuple(begin for begin, _ in bounds), tuple(end - begin for begin, end in bounds)
        inside = whole[tuple(slice(*each) for each in bounds)]
        wanted.append((number, Place(tuple(whole.shape), offset, ()).part(box), inside))
        if box and inside.numel() and draw(st.booleans()):
            begin = draw(st.integers(0, inside.numel() - 1))
            end = draw(st.integers(begin + 1, inside.numel()))
            place = Place(tuple(whole.shape), offset, (), box, begin)
            wanted[-1] = number, place.part((end - begin,)), inside.reshape(-1)[begin:end]
    return size, draw(st.sampled_from([64, 200, 1 << 20])), wholes, held, wanted


@given(_cases())
def test_each_rank_gets_what_it_asks_for_and_no_more(case: Any) -> None:
    size, window, wholes, held, wanted = case

    def body(comm: ThreadComm) -> None:
        counting, (number, part, expected) = Counting(comm), wanted[comm.rank]
        own = [piece for holder, piece in held if holder == comm.rank]
        found = fetch(own, lambda _, name, shape: part if name == f"t{number}" else None, counting)
        assert found.keys() == {("group", f"t{each}") for each in range(len(wholes))}
        mine = found.pop(("group", f"t{number}"))
        assert mine is not None and torch.equal(mine, expected) and torch.equal(part.of(wholes[number]), expected)
        assert all(other is None for other in found.values())
        assert counting.got_bytes <= padded(mine.nbytes) + 64 * 25 * len(held)  # of 5 boxes each, as the part

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


@pytest.mark.parametrize("size", [4, 16])
def test_a_number_that_all_need_does_not_divide_what_two_exchange(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the count of steps of a tensor, which one of its owners sends to all."""
    monkeypatch.setattr(transfer, "_WINDOW_BYTES", 1 << 12)

    def body(comm: ThreadComm) -> int:
        counting, rows, one = Counting(comm), torch.arange(900.0), torch.ones(())
        own = [_piece("rows", rows, (0,), (900,)), _piece("one", one, (), ())] if comm.rank == 0 else []
        needs: dict[str, Any] = {"one": ..., "rows": ... if comm.rank == 1 else None}
        found = fetch(own, lambda _, name, shape: needs[name], counting)
        assert found["group", "one"] == 1.0 and (comm.rank != 1 or torch.equal(found["group", "rows"], rows))
        return counting.calls

    assert max(on_ranks(size, body)) <= 9 + 3


FAR = Place((4, 3), (3, 0), ())


@pytest.mark.parametrize(
    ("other", "wrong"),
    [
        ([], "have -6 elements"),
        ([Piece("group", "t", torch.ones(2, 3).double(), Place((4, 3), (2, 0), ()))], "do not fit together"),
        ([Piece("group", "t", torch.ones(2, 3), FAR)], "do not fit together"),
    ],
)
def test_pieces_that_are_no_tensor_are_an_error_on_every_rank(other: list[Piece], wrong: str) -> None:
    def body(comm: ThreadComm) -> None:
        own = [_piece("t", torch.ones(4, 3), (0, 0), (2, 3))] if comm.rank == 0 else other
        with pytest.raises(ValueError, match=f"pieces of t {wrong}"):
            fetch(own, lambda *_: None, comm)

    on_ranks(2, body)


def test_a_parameter_is_a_piece() -> None:
    """It requires a gradient; what is fetched does not."""
    parameter = torch.nn.Parameter(torch.ones(3))
    own = [_piece("t", parameter, (0,), (3,))]
    (found,) = on_ranks(1, lambda comm: fetch(own, lambda *_: ..., comm))[0].values()
    assert found is not None and not found.requires_grad and torch.equal(found, parameter)
