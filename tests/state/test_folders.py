"""Looking for a shared file system leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.state.folders import is_folder_shared
from tests.support.thread_comm import ThreadComm, on_ranks


def test_ranks_of_one_folder_share_it_and_find_it_as_it_was(tmp_path: Path) -> None:
    assert on_ranks(2, lambda comm: is_folder_shared(comm, tmp_path if comm.rank == 0 else None)) == [True, True]
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_where_a_rank_is_lost_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(comm: ThreadComm, tensor: object, *, name: str) -> None:
        raise ConnectionError

    monkeypatch.setattr(ThreadComm, "allgather", lost)
    with pytest.raises(ConnectionError):
        on_ranks(2, lambda comm: is_folder_shared(comm, tmp_path if comm.rank == 0 else None))
    assert list(tmp_path.iterdir()) == []
