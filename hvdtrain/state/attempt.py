"""One try to write a checkpoint, as one rank sees it: no collective, in whatever thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.errors import CheckpointError
from hvdtrain.state.store import CheckpointStore
from hvdtrain.state.train_state import StateDict
from hvdtrain.state.writing import Abandoned, gather_shards, report_failure, report_shard, write_shard


@dataclass(frozen=True)
class Attempt:
    """What is to be written, and where.

    Attributes:
        folder: the temporary one.
        step: optimizer steps done.
        count: of writers; this rank is one of them.
        mine: gives the tensors that this rank writes, with the values of the whole state.
        others: how many tensors the other ranks write.
        notes: for the manifest.
        keep: how many of the newest checkpoints stay; None for all.
    """

    folder: Path
    step: int
    count: int
    mine: Callable[[], StateDict]
    others: int
    notes: Mapping[str, Any]
    keep: int | None

    def lead(self, store: CheckpointStore, progress: Callable[[], None], abandoned: threading.Event) -> str:
        """On rank 0: write, wait for the other ranks, make a checkpoint of it; its name.

        Errors:
            CheckpointError: it could not be written, by whichever rank.
            Abandoned: nobody wants it any more.
        """
        try:
            with store.writing(self.step, self.folder):
                mine = self.mine()
                files = write_shard(self.folder, 0, self.count, mine, progress)
                if self.count > 1:
                    files |= gather_shards(
                        self.folder, self.count, self.step, self.others, progress=progress, abandoned=abandoned
                    )
                path = store.finish(self.folder, self.step, mine.values, self.notes, files)
            if self.keep is not None:
                store.retain(self.keep, path, progress)
        except (CheckpointError, Abandoned):
            raise
        except Exception as error:  # in a thread nobody else would hear of it
            raise CheckpointError(f"the checkpoint of step {self.step} could not be written: {error!r}") from error
        return path.name

    def follow(self, number: int, progress: Callable[[], None]) -> None:
        """On rank `number`, which is not 0: write, and leave word. Of what fails rank 0 tells, which waits for it.

        Errors:
            Abandoned: nobody wants it any more.
        """
        try:
            mine = self.mine()
            files = write_shard(self.folder, number, self.count, mine, progress)
            report_shard(self.folder, number, self.step, mine, files)
        except Abandoned:
            raise
        except Exception as error:
            report_failure(self.folder, number, error)
