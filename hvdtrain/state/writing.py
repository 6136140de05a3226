"""How the ranks of a job write one checkpoint together: through files in its temporary folder alone.

::

    checkpoints/.writing-step-000100-NONCE-PID-HOST/     made by rank 0
        wanted-00001                  by rank 0, for every writer but itself
        model-00002-of-00002.safetensors ...             by that writer, each fsynced
        shard-00001.json              by that writer, last and whole or not at all: size and checksum of its files
        failed-00001-ENOSPC           what `wanted-00001` is renamed to in its place: that needs no room on a full disk

Rank 0 waits for a word of each writer, writes the manifest of all and renames the folder. No collective is needed, so
that all of it may be done by threads. The nonce keeps a writer that was left behind out of the next attempt's folder.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from hvdtrain.durable import fsync, write_text
from hvdtrain.state.shards import file_name
from hvdtrain.state.tensor_file import Facts, write_tensors
from hvdtrain.state.train_state import StateDict

PATIENCE_S = 120.0
"""How long nothing may change in the folder until the other writers are given up."""

_LOOK_S = (0.01, 0.5)
"""Between two looks: at first, at most."""


class Abandoned(Exception):
    """Nobody wants this checkpoint any more."""


def want_shards(folder: Path, count: int) -> None:
    """On rank 0, before any rank writes: ask the writers 1 to `count` - 1 for theirs. Errors: OSError."""
    for number in range(1, count):
        (folder / f"wanted-{number:05d}").touch()


def write_shard(
    folder: Path, number: int, count: int, state: StateDict, progress: Callable[[], None]
) -> dict[str, Facts]:
    """Write the tensors of writer `number` of `count`; what its files are, on the disk. Errors: OSError."""
    files = {}
    for group, tensors in state.tensors.items():
        name = file_name(group, number, count)
        files[name] = write_tensors(folder / name, tensors, progress)
        progress()
    for name in files:  # not one by one: the disk is busy with the first while the last is written
        fsync(folder / name)
        progress()
    return files


def report_shard(folder: Path, number: int, step: int, state: StateDict, files: Mapping[str, Facts]) -> None:
    """Leave word that a writer other than 0 is done. Errors: OSError."""
    content = {"step": step, "tensors": state.count, "files": {name: asdict(facts) for name, facts in files.items()}}
    write_text(folder / f"shard-{number:05d}.json", json.dumps(content))


def report_failure(folder: Path, number: int, error: Exception) -> None:
    """Leave word that a writer other than 0 could not write."""
    name = errno.errorcode.get((error.errno if isinstance(error, OSError) else None) or errno.EIO, "EIO")
    with suppress(OSError):
        (folder / f"wanted-{number:05d}").rename(folder / f"failed-{number:05d}-{name}")


def gather_shards(
    folder: Path,
    count: int,
    step: int,
    tensors: int,
    *,
    progress: Callable[[], None],
    abandoned: threading.Event,
    patience_s: float = PATIENCE_S,
) -> dict[str, Facts]:
    """On rank 0: wait for the other writers; what their files are. Their words are removed.

    Args:
        folder: the temporary one.
        count: of writers.
        step: that all have to be of.
        tensors: how many the others have to have written.
        progress: called whenever something has changed.
        abandoned: ends the waiting.
        patience_s: see `PATIENCE_S`.

    Errors:
        OSError: one of them could not write, or is not heard of.
        Abandoned: `abandoned` was set.
    """
    waited_s, look_s, before = 0.0, _LOOK_S[0], None
    while True:
        now = _sizes(folder)
        _raise_failure(now)
        if all(f"shard-{number:05d}.json" in now for number in range(1, count)):
            return _take(folder, count, step, tensors)
        if now != before:
            waited_s, before = 0.0, now
            progress()
        if waited_s > patience_s:
            missing = [number for number in range(1, count) if f"shard-{number:05d}.json" not in now]
            raise OSError(errno.ETIMEDOUT, f"rank {missing[0]} has not written its part: nothing for {waited_s:.0f} s")
        if abandoned.wait(look_s):
            raise Abandoned
        waited_s, look_s = waited_s + look_s, min(2 * look_s, _LOOK_S[1])


def _take(folder: Path, count: int, step: int, tensors: int) -> dict[str, Facts]:
    files: dict[str, Facts] = {}
    found = 0
    for number in range(1, count):
        word = json.loads((folder / f"shard-{number:05d}.json").read_text())
        if word["step"] != step:
            raise OSError(errno.ESTALE, f"rank {number} has written step {word['step']}, not {step}")
        found += word["tensors"]
        files |= {name: Facts(**facts) for name, facts in word["files"].items()}
    if found != tensors:
        raise OSError(errno.ESTALE, f"the other ranks have written {found} tensors, not {tensors}")
    for name, facts in files.items():
        with (folder / name).open("rb") as file:  # a network file system looks anew when it is opened
            if os.fstat(file.fileno()).st_size != facts.size_bytes:
                raise OSError(errno.EIO, f"{name} is not as large as it was written")
    for number in range(1, count):
        (folder / f"wanted-{number:05d}").unlink()
        (folder / f"shard-{number:05d}.json").unlink()
    fsync(folder)
    return files


def _raise_failure(names: Mapping[str, int]) -> None:
    for name in names:
        if name.startswith("failed-"):
            _, rank, code = name.split("-", 2)
            number: int = getattr(errno, code, errno.EIO)
            raise OSError(number, f"{os.strerror(number)} (rank {int(rank)})")


def _sizes(folder: Path) -> dict[str, int]:
    with os.scandir(folder) as entries:
        found = {}
        for entry in entries:
            with suppress(FileNotFoundError):  # renamed since it was listed
                found[entry.name] = entry.stat().st_size
        return found
