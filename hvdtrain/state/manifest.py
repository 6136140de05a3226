"""The manifest of a checkpoint: `manifest.json`, with a checksum of each file and of itself.

Format 2::

    {"format": 2, "step": 100, "heldout_loss": 1.5,
     "files": {"model.safetensors": {"bytes": 1234, "xxh3_128": "...", "blocks": "..."}, ...},
     "xxh3_128": "..."}        of all other keys, as JSON with sorted keys and without blanks

`blocks` has the XXH3 with 64 bits of each 4 MiB of a file of tensors; files of older versions have none.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from hvdtrain.errors import CheckpointError, UnreadableCheckpointError
from hvdtrain.files import read_regular
from hvdtrain.state.pieces import Assembly, StateDict
from hvdtrain.state.shard_files import file_group
from hvdtrain.state.stored_file import CHECKSUM, FileDigest, damaged, read_verified
from hvdtrain.state.tensor_file import boxes_in, read_tensors
from hvdtrain.state.train_state import check_values

FORMAT = 2
MANIFEST = "manifest.json"
VALUES = "state.json"
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO, errno.ELOOP)
"""Errors that mean damage on the disk. Others, such as no permission or too many open files, do not."""


def manifest_text(step: int, notes: Mapping[str, Any], files: Mapping[str, FileDigest]) -> str:
    """Return the content of `MANIFEST`."""
    entries = {
        name: {"bytes": found.size_bytes, CHECKSUM: found.checksum, "blocks": found.blocks}
        for name, found in sorted(files.items())
    }
    content = {"format": FORMAT, "step": step, **notes, "files": entries}
    return json.dumps({**content, CHECKSUM: _own_checksum(content)}, indent=1)


def read_manifest(path: Path) -> dict[str, Any]:
    """Read and verify the manifest of a checkpoint in the directory `path`.

    Errors: CheckpointError: it is missing or changed, or has an unknown format; UnreadableCheckpointError: see
    `detect_unreadable`.
    """
    file = path / MANIFEST
    try:
        with detect_unreadable(path):
            manifest = json.loads(read_regular(file))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is damaged: its {MANIFEST} cannot be read",
            found=str(error),
            next_step="name the directory of a checkpoint, such as RUN/checkpoints/step-000100",
        ) from None
    manifest = manifest if isinstance(manifest, dict) else {}
    form = manifest.get("format")
    content = {key: value for key, value in manifest.items() if key != CHECKSUM}
    # First, because the format number itself may have changed.
    if (CHECKSUM in manifest or form == FORMAT) and manifest.get(CHECKSUM) != _own_checksum(content):
        expected = f"{CHECKSUM} {str(manifest.get(CHECKSUM))[:12]}..."
        found = _own_checksum(content)[:12] + "..."
        raise damaged(file, ": it has changed since it was written", expected=expected, found=found)
    if form is None:
        raise damaged(file, ": it has no format number", expected=f"format {FORMAT}")
    if form != FORMAT or isinstance(form, (bool, float)):
        raise CheckpointError(
            f"{path} has a format that this version cannot read",
            expected=f"{MANIFEST} of format {FORMAT}",
            found=str(form)[:80],
            next_step="read it with the version of hvdtrain that wrote it",
        )
    return content


@contextmanager
def detect_unreadable(path: Path) -> Iterator[None]:
    """Distinguish files that cannot be opened from damaged ones. `path` is a checkpoint, or the folder of all.

    Errors: UnreadableCheckpointError: an OSError that does not mean damage on the disk.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _DAMAGE:
            raise
        fix = "allow this user to read it (see ls -l)"
        if error.errno in (errno.EMFILE, errno.ENFILE):
            fix = "raise the limit of open files (ulimit -n; nofile in /etc/security/limits.conf)"
        raise UnreadableCheckpointError(
            f"{path} cannot be read: {error.strerror or error}",
            found=f"{error.filename or path}",
            next_step=f"{fix}, then start again; it may be complete, and is unchanged",
        ) from error


def read_state(
    path: Path, progress: Callable[[], None], groups: Container[str] | None = None, *, verifies_all: bool = True
) -> StateDict:
    """Return the whole tensors of a checkpoint, on the CPU. They are read when they are used.

    Every byte is verified now, or, if not `verifies_all`, those of tensors when they are used. With `groups`, only
    these groups of tensors.

    Errors: CheckpointError: a file is missing or changed; others: the directory is no checkpoint of hvdtrain.
    """
    manifest = read_manifest(path)
    values: dict[str, Any] | None = None
    tensors: dict[str, Assembly] = {}
    for name, file, digest in _files(path, manifest):
        if name == VALUES:
            values = json.loads(read_verified(file, digest, progress).numpy().tobytes())
        elif name.endswith(".safetensors"):
            if groups is not None and file_group(name) not in groups:
                continue
            group = tensors.setdefault(file_group(name), Assembly())
            found, places = read_tensors(file, digest, progress, verifies_all=verifies_all)
            for tensor_name, tensor in found.items():
                for box, shape, offset in boxes_in(tensor, places.get(tensor_name)):
                    group.add(tensor_name, box, shape, offset)
        else:
            read_verified(file, digest, progress)
        progress()
    if not isinstance(values, dict):
        raise ValueError(f"no {VALUES}")
    check_values(path, values)
    steps = values["progress"]["step"], manifest.get("step"), *map(int, re.findall(r"^step-(\d+)", path.name))
    if len({*steps}) > 1:
        raise damaged(path, f": it contains step {steps[0]} instead of step {steps[-1]}")
    for group in tensors.values():
        group.check()
    return StateDict(tensors, values)


def verify(path: Path, progress: Callable[[], None]) -> None:
    """Read every byte of a checkpoint. Errors: see `read_state`."""
    for _, file, digest in _files(path, read_manifest(path)):
        read_verified(file, digest, progress)


def _files(path: Path, manifest: Mapping[str, Any]) -> list[tuple[str, Path, FileDigest]]:
    for name in manifest["files"]:
        if name != Path(name).name:
            raise ValueError(f"{name!r} is not a file name")
    entries = manifest["files"].items()
    return [
        (name, path / name, FileDigest(int(entry["bytes"]), entry[CHECKSUM], entry.get("blocks", "")))
        for name, entry in entries
    ]


def _own_checksum(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
