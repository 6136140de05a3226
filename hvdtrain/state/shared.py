"""Whether the ranks of a job see the same files."""

from __future__ import annotations

import secrets
from contextlib import suppress
from pathlib import Path

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import allgather_json, on_rank_0


def share_files(comm: Comm, folder: Path | None) -> bool:
    """Whether there are other ranks, and all see what rank 0 writes into `folder`. Collective: yes.

    Args:
        comm: the ranks.
        folder: on rank 0, and there already. Elsewhere it is not used.
    """
    if comm.size == 1:
        return False
    made: list[Path] = []

    def make() -> str:
        assert folder is not None
        path = folder.resolve() / f".shared-{secrets.token_hex(8)}"
        with suppress(OSError):  # a full disk: each save finds out for itself
            path.touch()
            made.append(path)
            return str(path)
        return ""

    try:
        place = on_rank_0(comm, make, name="shared/file")
        return all(allgather_json(comm, bool(place) and Path(place).exists(), name="shared/seen"))
    finally:
        for path in made:  # also where a rank is lost meanwhile
            with suppress(OSError):
                path.unlink()
