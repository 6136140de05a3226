"""Whether all ranks of a job see the same files."""

from __future__ import annotations

import secrets
from contextlib import suppress
from pathlib import Path

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import allgather_json, on_rank_0


def is_folder_shared(comm: Comm, folder: Path | None) -> bool:
    """Return whether there are other ranks, and all see the files that rank 0 writes to `folder`. Collective: yes.

    Args:
        comm: the ranks.
        folder: an existing folder on rank 0; ignored elsewhere.
    """
    if comm.size == 1:
        return False
    made: list[Path] = []

    def make_probe() -> str:
        assert folder is not None
        path = folder.resolve() / f".shared-{secrets.token_hex(8)}"
        with suppress(OSError):  # a full disk: each save reports it
            path.touch()
            made.append(path)
            return str(path)
        return ""

    try:
        probe = on_rank_0(comm, make_probe, name="shared/file")
        return all(allgather_json(comm, bool(probe) and Path(probe).exists(), name="shared/seen"))
    finally:
        for path in made:  # also if a rank is lost meanwhile
            with suppress(OSError):
                path.unlink()
