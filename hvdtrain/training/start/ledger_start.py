"""Where a start of a run begins in its ledger."""

from __future__ import annotations

import socket

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import allgather_json
from hvdtrain.data.loader import Stream
from hvdtrain.state.ledger import Ledger, StartHeader, next_start
from hvdtrain.state.train_state import Progress


def begin_start(ledger: Ledger, comm: Comm, stream: Stream, progress: Progress, why: str) -> None:
    """Begin a file of `ledger` for the steps after `progress`. Collective: yes.

    Args:
        ledger: of this rank.
        comm: the ranks.
        stream: this rank's share.
        progress: equal on all ranks.
        why: started, round (of an elastic job), or rolled_back.
    """
    # Hosts that share no files may have been in other starts: rank 0's was not in all, where it was lost for a time.
    start = max(allgather_json(comm, next_start(ledger.folder) if comm.local_rank == 0 else 0, name="ledger/start"))
    head = StartHeader(
        start=start,
        why=why,
        from_step=progress.step,
        position=progress.position,
        size=comm.size,
        rank=comm.rank,
        host=socket.gethostname(),
        seed=stream.seed,
        global_batch=stream.global_batch,
        micro_batch=stream.micro_batch,
        samples=progress.samples,
        data_id=progress.data_id,
        left_out=progress.left_out,
    )
    ledger.begin_start(head)
