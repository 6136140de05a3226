"""A start of a run has one number on all ranks, and no start before it had that."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.data.loader import Stream
from hvdtrain.state.ledger import Ledger, ledger_files
from hvdtrain.state.train_state import Progress
from hvdtrain.training.loop.feed import begin_start
from tests.support.thread_comm import ThreadComm, on_ranks


@pytest.mark.parametrize("ahead", [0, 1])
def test_hosts_that_share_no_files_do_not_write_into_those_of_an_earlier_start(ahead: int, tmp_path: Path) -> None:
    """One of two hosts was in starts that the other was not in, as where the ranks of a whole host are lost."""

    def begin(comm: ThreadComm) -> None:
        comm.local_rank, comm.local_size = 0, 1
        folder = tmp_path / str(comm.rank)
        for start in range(3 if comm.rank == ahead else 1):
            folder.mkdir(exist_ok=True)
            (folder / f"start-{start:04d}.rank-{comm.rank:05d}.jsonl").touch()
        ledger = Ledger(folder, pytest.fail)
        stream = Stream([0] * 9, 7, 4, 2, comm.rank, comm.size)  # type: ignore[arg-type]
        begin_start(ledger, comm, stream, Progress(samples=9), "started")
        ledger.close()

    on_ranks(2, begin)
    assert [ledger_files(tmp_path / str(rank))[-1][:2] for rank in range(2)] == [(3, 0), (3, 1)]
