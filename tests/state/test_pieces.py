"""Pieces of tensors make whole tensors, in files and between ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hvdtrain.errors import CheckpointError
from hvdtrain.runtime.tuning import return_freed_memory
from hvdtrain.state.background_writer import CheckpointWriter
from hvdtrain.state.checkpoint_store import CheckpointStore, load
from hvdtrain.state.pieces import Assembly, Place, StateDict, specs
from hvdtrain.state.tensor_file import boxes_in, read_tensors, write_tensors
from hvdtrain.state.transfer import gather_pieces
from tests.support.thread_comm import ThreadComm, on_ranks

MOMENT = torch.arange(35, dtype=torch.float32).reshape(5, 7)
_VALUES = {"progress": {"step": 1}}
MODEL = {"w": torch.ones(5, 7)}
ROWS = {0: (0, 2), 1: (2, 2), 2: (2, 5)}


def _save(folder: Path, state_of: Callable[[int], StateDict], size: int, min_bytes: int = 1) -> Path:
    """Save what each rank has, and return the path of the checkpoint."""

    def save(comm: ThreadComm) -> None:
        store = CheckpointStore(folder / "checkpoints", print) if comm.rank == 0 else None
        writer = CheckpointWriter(comm, store, size, lambda event: None, print, min_bytes=min_bytes)
        with writer.opened():
            writer.save(1, state_of(comm.rank), {}, wait=True)

    on_ranks(size, save, at_once=True)
    (saved,) = CheckpointStore(folder / "checkpoints", print).list()
    return saved.path


def _state(rank: int) -> StateDict:
    """Rank 1 owns nothing of the moment; a count is on ranks 0 and 2."""
    begin, end = ROWS[rank]
    tensors = {"model": MODEL, "optimizer": {"w/m": MOMENT[begin:end], "w/step": torch.tensor(3.0)}}
    places = {("optimizer", "w/m"): Place((5, 7), (begin, 0), (rank,)), ("optimizer", "w/step"): Place((), (), (0, 2))}
    if rank == 1:
        return StateDict({"model": MODEL, "optimizer": {}}, _VALUES)
    return StateDict(tensors, _VALUES, places)


def _check(state: StateDict) -> None:
    assert state.tensors["optimizer"].keys() == {"w/m", "w/step"}
    assert torch.equal(state.tensors["optimizer"]["w/m"], MOMENT)
    assert state.tensors["optimizer"]["w/step"] == 3
    assert torch.equal(state.tensors["model"]["w"], MODEL["w"])


def test_rank_0_gathers_whole_tensors() -> None:
    gathered = on_ranks(3, lambda comm: gather_pieces(_state(comm.rank), comm))
    _check(gathered[0])
    assert not gathered[1].tensors["optimizer"] and not gathered[0].places


@pytest.mark.parametrize("min_bytes", [1, 1 << 30])
def test_a_checkpoint_of_pieces_is_read_whole(min_bytes: int, tmp_path: Path) -> None:
    saved = _save(tmp_path, _state, 3, min_bytes)
    _check(load(saved))
    files = [path for path in saved.iterdir() if path.name.startswith("optimizer")]
    assert len(files) == (1 if min_bytes > 1 else 2)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_a_checkpoint_need_not_fit_into_memory(tmp_path: Path) -> None:
    """It is verified, but only what is used of it is in memory that cannot be freed."""

    def own_mib() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) >> 10

    def state_of(rank: int) -> StateDict:
        place = Place((2048, 8192), (1024 * rank, 0), (rank,))
        rows = torch.full((1024, 8192), float(rank))
        return StateDict({"model": MODEL, "optimizer": {"w/m": rows}}, _VALUES, {("optimizer", "w/m"): place})

    saved = _save(tmp_path, state_of, 2)
    return_freed_memory()  # of the tests before, which would be used again
    before = own_mib()
    loaded = load(saved).tensors["optimizer"]
    assert specs(loaded) == {"w/m": ((2048, 8192), torch.float32)}
    assert own_mib() - before < 16
    whole = loaded["w/m"]
    assert own_mib() - before > 48
    assert whole[1023].unique() == 0 and whole[1024].unique() == 1


CUBE = torch.arange(120, dtype=torch.float32).reshape(4, 5, 6)


def _flat_state(rank: int) -> StateDict:
    """Of 3 ranks, each has elements of the cube that begin and end inside of rows; rank 0 has one element."""
    begin, end = ((0, 1), (1, 53), (53, 120))[rank]
    place = Place((4, 5, 6), (0, 0, 0), (rank,), (4, 5, 6), begin)
    tensors = {"model": MODEL, "optimizer": {"w/m": CUBE.reshape(-1)[begin:end]}}
    return StateDict(tensors, _VALUES, {("optimizer", "w/m"): place})


@pytest.mark.parametrize("min_bytes", [1, 1 << 30])
def test_a_checkpoint_of_elements_is_read_whole(min_bytes: int, tmp_path: Path) -> None:
    loaded = load(_save(tmp_path, _flat_state, 3, min_bytes)).tensors["optimizer"]
    assert specs(loaded) == {"w/m": ((4, 5, 6), torch.float32)} and torch.equal(loaded["w/m"], CUBE)
    assert isinstance(loaded, Assembly) and torch.equal(loaded.whole("w/m")[1:3, 2:5, 3:4], CUBE[1:3, 2:5, 3:4])


WRONG = [
    [[4, 5, 6], 90],
    [[4, 5, 6], -1],
    [[4, 0, 6], 0],
    [[-4, -5, 6], 0],
    [[1, 9, 9], 0],
    [[4, 5, 6, 1], 0],
    [[4, 5, 10**4000], 0],
]


@pytest.mark.parametrize("elements", WRONG)
def test_elements_that_do_not_fit_are_refused(elements: list[Any], tmp_path: Path) -> None:
    digest = write_tensors(tmp_path / "a", {"w": torch.zeros(40)}, lambda: None)
    stored = read_tensors(tmp_path / "a", digest, lambda: None)[0]["w"]
    assembly = Assembly()
    with pytest.raises(ValueError, match=r"elements from|does not fit"):
        for piece, shape, offset in boxes_in(stored, [[4, 5, 6], [0, 0, 0], *elements]):
            assembly.add("w", piece, shape, offset)


def test_a_missing_piece_is_found(tmp_path: Path) -> None:
    saved = _save(tmp_path, lambda rank: _state(min(rank, 1)), 3)
    with pytest.raises(CheckpointError, match="is damaged") as caught:
        load(saved)
    assert "w/m" in str(caught.value.found)


@pytest.mark.parametrize(
    ("shape", "offset", "piece"),
    [
        ((5, 7), (4, 0), torch.zeros(2, 7)),
        ((5, 7), (-1, 0), torch.zeros(2, 7)),
        ((5, 8), (0, 0), torch.zeros(5, 8)),
        ((5, 7), (2, 0), torch.zeros(3, 7).half()),
    ],
)
def test_a_piece_that_does_not_fit_is_refused(
    shape: tuple[int, ...], offset: tuple[int, ...], piece: torch.Tensor
) -> None:
    assembly = Assembly()
    assembly.add("w", MOMENT[:2], (5, 7), (0, 0))
    with pytest.raises(ValueError, match="does not fit"):
        assembly.add("w", piece, shape, offset)
