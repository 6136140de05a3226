"""A lease on a folder of an object store: one job at a time copies its run there.

The folder ``.lease`` has objects with consecutive numbers. A job takes the lease by creating the next number, which
only one can do where the store has conditional writes; the holder of the highest number has the lease.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hvdtrain.errors import RunDirectoryError, StoreError
from hvdtrain.lease import Lease, describe_holder, holder_lives
from hvdtrain.object_store import StoreFolder

FOLDER = ".lease"

BEAT_S = 10.0  # between two writes of a holder


class _Objects:
    """A claim among those of a folder."""

    def __init__(self, folder: StoreFolder, name: str) -> None:
        self._folder, self._name = folder, name

    def read(self) -> dict[str, Any]:
        with suppress(StoreError):
            return _newest(self._folder)[1]
        return {}

    def write(self, content: dict[str, Any]) -> None:
        with suppress(StoreError):
            self._folder.write(self._name, json.dumps(content).encode())

    def remove(self) -> None:
        """Mark it as released: a job that listed it before creates the next number, not this one again."""
        self.write({"released": True})


def take_store_lease(folder: StoreFolder, job: str, wait: Callable[[float], None] = time.sleep) -> Lease:
    """Take the lease of a folder. `job` identifies the job, which may take it from itself; "" if nothing does.

    A holder on this host is looked up among the processes, one elsewhere is observed for 4 beats.

    Errors: RunDirectoryError: a living job has the lease; StoreError: the store has no conditional writes.
    """
    number, found = _newest(folder)
    is_own = bool(job) and found.get("job") == job
    is_held = found and not found.get("released") and not is_own
    if is_held and holder_lives(found, lambda: _newest(folder)[1], wait, BEAT_S):
        raise _taken(folder)
    who = {**describe_holder(), "job": job}
    name = _name(number + 1)
    if not folder.create(name, json.dumps(who).encode()) or _newest(folder)[0] > number + 1:
        raise _taken(folder)
    if folder.create(name, json.dumps({**who, "again": True}).encode()):
        folder.remove([name])
        raise StoreError(
            f"{folder.url} does not support conditional writes, so two jobs could write there at once",
            expected="a store that refuses to create an object which exists, such as S3",
            next_step="use another store, or, if no other job writes there, --checkpoint.lease false",
        )
    folder.remove([_name(number - 1)] if number > 1 else [])
    return Lease(_Objects(folder, name), who, BEAT_S)


def _newest(folder: StoreFolder) -> tuple[int, dict[str, Any]]:
    numbers = [int(stem) for name in folder.sizes(FOLDER) if (stem := name.rpartition("/")[2].split(".")[0]).isdigit()]
    if not numbers:
        return 0, {}
    try:
        content = json.loads(folder.read(_name(max(numbers))))
    except ValueError:
        content = None
    return max(numbers), content if isinstance(content, dict) else {"unreadable": "half written, so it is a claim"}


def _name(number: int) -> str:
    return f"{FOLDER}/{number:08d}.json"


def _taken(folder: StoreFolder) -> RunDirectoryError:
    return RunDirectoryError(
        f"another job copies its checkpoints to {folder.url}",
        expected="one job at a time",
        next_step="wait for its end, or give another --checkpoint.to",
    )
