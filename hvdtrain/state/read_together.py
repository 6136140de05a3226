"""Read a checkpoint on all ranks together: each reads, and verifies, only what it holds.

Rank 0 reads what the files contain, and tells the other ranks. So a rank opens only files with tensors that it needs.
Rank 0 verifies what ranks need as a whole; `sync.broadcast_state` sends it.

torch.distributed.checkpoint is not used: its files have no checksums, and its index is a pickle.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import xxhash
from torch import Tensor

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import allgather_json, broadcast_json
from hvdtrain.errors import CheckpointError, UnreadableCheckpointError
from hvdtrain.state.checkpoint_store import MANIFEST, detect_damage, load
from hvdtrain.state.pieces import DTYPES, Assembly, Key, StateDict, lazily, named_like
from hvdtrain.state.stored_file import FileDigest, StoredFile, StoredTensor
from hvdtrain.state.train_state import TrainState

Parts = dict[Key, Tensor | None]
"""What a rank holds of tensors that it does not hold as a whole; None for nothing."""
Read = Callable[[Path], StateDict]
Found = TypeVar("Found")


def find_together(
    find: Callable[[Read], Found], state: TrainState, comm: Comm, progress: Callable[[], None]
) -> tuple[Callable[[], Found], Parts | None]:
    """Find a checkpoint on rank 0, where `find` gets a function that reads one on all ranks. Collective: yes.

    Returns a function for rank 0 that gives the result, or the error, of `find`, and what this rank has read of the
    last checkpoint; None if not all ranks see it.
    """
    parts: Parts | None = None

    def read(path: Path) -> StateDict:
        nonlocal parts
        if comm.size == 1:
            return load(path, progress)
        stored = load(path, progress, verifies_all=False)
        index = _index(path.absolute(), stored)
        broadcast_json(comm, index, name="read/index")
        parts = _read(index, stored, state, comm, progress)
        return load(path, progress) if parts is None else stored

    outcome: Future[Found] = Future()
    if comm.rank:
        while (index := broadcast_json(comm, None, name="read/index")) is not None:
            try:
                parts = _read(index, _of_index(index, progress), state, comm, progress)
            except CheckpointError:  # rank 0 has it, too
                parts = None
    else:
        try:
            outcome.set_result(find(read))
        except Exception as error:
            outcome.set_exception(error)
        finally:
            if comm.size > 1:
                broadcast_json(comm, None, name="read/index")
    return outcome.result, parts


def _read(
    index: dict[str, Any], stored: StateDict, state: TrainState, comm: Comm, progress: Callable[[], None]
) -> Parts | None:
    """Return what this rank holds; rank 0 verifies what it needs as a whole, too. Collective: yes.

    Errors: CheckpointError, UnreadableCheckpointError: on every rank, if one cannot read its part.
    """
    path = Path(index["path"])
    if not all(allgather_json(comm, _manifest_hash(path) == index["manifest"], name="read/seen")):
        return None
    found: Parts = {}
    failed: tuple[bool, str] | None = None
    try:
        with detect_damage(path):
            for group, tensors in named_like(stored, state.model.state_dict()).tensors.items():
                for name in tensors:
                    whole = lazily(tensors, name)
                    part = state.held_part(group, name, whole.shape)
                    if part is not ...:
                        found[group, name] = None if part is None else part.of(whole)
                    elif not comm.rank:
                        whole[...]
                    progress()
    except CheckpointError as error:
        failed = isinstance(error, UnreadableCheckpointError), error.what
    for rank, each in enumerate(allgather_json(comm, failed, name="read/failed")):
        if each is not None:
            raise (UnreadableCheckpointError if each[0] else CheckpointError)(f"{each[1]} (on rank {rank})")
    return found


def _manifest_hash(path: Path) -> str:
    """Return a hash of the manifest; "" if this rank does not see it."""
    try:
        return xxhash.xxh3_128((path / MANIFEST).read_bytes()).hexdigest()
    except OSError:
        return ""


def _index(path: Path, stored: StateDict) -> dict[str, Any]:
    """Return what files contain, for `_of_index`."""
    files: dict[StoredFile, int] = {}
    tensors: dict[str, dict[str, list[Any]]] = {}
    for group, assembly in stored.tensors.items():
        assert isinstance(assembly, Assembly)
        entries = tensors.setdefault(group, {})
        for name in assembly:
            pieces = assembly.whole(name).pieces
            placed = [
                [place.offset, piece.shape, files.setdefault(piece.file, len(files)), piece.begin]
                for place, piece in pieces
                if isinstance(piece, StoredTensor)
            ]
            entries[name] = [str(pieces[0][1].dtype), pieces[0][0].shape, placed]
    named = [[f.path.name, f.digest.size_bytes, f.digest.checksum, f.digest.blocks] for f in files]
    where = {"path": str(path), "manifest": _manifest_hash(path), "files": named}
    return {**where, "aliases": stored.values["aliases"], "tensors": tensors}


def _of_index(index: dict[str, Any], progress: Callable[[], None]) -> StateDict:
    """Return the tensors of an index, which are read when they are used."""
    folder = Path(index["path"])
    files = [StoredFile(folder / name, FileDigest(*digest), progress) for name, *digest in index["files"]]
    tensors: dict[str, Assembly] = {}
    for group, entries in index["tensors"].items():
        assembly = tensors[group] = Assembly()
        for name, (dtype, shape, pieces) in entries.items():
            for offset, size, file, begin in pieces:
                piece = StoredTensor(files[file], begin, tuple(size), DTYPES[dtype])
                assembly.add(name, piece, shape, offset)
    return StateDict(tensors, {"aliases": index["aliases"]})
