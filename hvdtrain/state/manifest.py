"""What a checkpoint says of itself: `manifest.json`, with a checksum a file and one of its own.

Format 2::

    {"format": 2, "step": 100, "heldout_loss": 1.5,
     "files": {"model.safetensors": {"bytes": 1234, "xxh3_128": "..."}, ...},
     "xxh3_128": "..."}        of all the rest, as JSON with sorted keys and without blanks

Format 1 had SHA-256 of each file and none of its own. It is read, not written.
"""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hvdtrain.errors import CheckpointError, UnreadableCheckpointError
from hvdtrain.regular import read_regular
from hvdtrain.state.shards import group_of
from hvdtrain.state.tensor_file import CHECKSUM, Facts, checksum, read, read_tensors
from hvdtrain.state.train_state import StateDict

FORMAT = 2
MANIFEST = "manifest.json"
VALUES = "state.json"
_FORMAT_1_CHECKSUM = "sha256"
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO, errno.ELOOP)
"""Errors that speak of what is on the disk. Others (no permission, too many open files) say nothing of the bytes."""


def manifest_text(step: int, notes: Mapping[str, Any], files: Mapping[str, Facts]) -> str:
    """What is written into `MANIFEST`."""
    content = {
        "format": FORMAT,
        "step": step,
        **notes,
        "files": {name: {"bytes": facts.size_bytes, CHECKSUM: facts.checksum} for name, facts in sorted(files.items())},
    }
    return json.dumps({**content, CHECKSUM: _own_checksum(content)}, indent=1)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint in the directory `path`, verified.

    Errors:
        CheckpointError: there is none, it was changed, or it is of a format that is not known.
        UnreadableCheckpointError: see `readable`.
    """
    file = path / MANIFEST
    try:
        with readable(path):
            manifest = json.loads(read_regular(file))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is damaged: its {MANIFEST} cannot be read",
            found=str(error),
            next_step="give the directory of a checkpoint, such as RUN/checkpoints/step-000100",
        ) from None
    told = manifest if isinstance(manifest, dict) else {}
    form = told.get("format")
    content = {key: value for key, value in told.items() if key != CHECKSUM}
    # First: a number that was changed says nothing of a format.
    if (CHECKSUM in told or form == FORMAT) and told.get(CHECKSUM) != _own_checksum(content):
        raise CheckpointError(
            f"{file} is damaged: it was changed since it was written",
            expected=f"{CHECKSUM} {str(told.get(CHECKSUM))[:12]}...",
            found=_own_checksum(content)[:12] + "...",
            next_step="resume from another checkpoint",
        )
    if form is None:
        raise CheckpointError(
            f"{file} is damaged: it does not say of which format it is",
            expected=f"format 1 or {FORMAT}",
            next_step="resume from another checkpoint",
        )
    if form not in (1, FORMAT) or isinstance(form, (bool, float)):
        raise CheckpointError(
            f"{path} has a format that this version does not read",
            expected=f"{MANIFEST} of format 1 or {FORMAT}",
            found=str(form)[:80],
            next_step="read it with the version of hvdtrain that wrote it",
        )
    return content


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Tell files that cannot be opened from damaged ones; `path` is that of the checkpoint, or of all of them.

    Errors:
        UnreadableCheckpointError: an OSError that says nothing of what is on the disk.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _DAMAGE:
            raise
        raise UnreadableCheckpointError(
            f"{path} cannot be read: {error.strerror or error}",
            found=f"{error.filename or path}",
            next_step="it may be whole, and was left as it is: see that this user may read it (ls -l), and start again",
        ) from error


def read_state(path: Path, progress: Callable[[], None]) -> StateDict:
    """Read and verify all of a checkpoint. Tensors on the CPU; those of a file share one buffer.

    Errors:
        CheckpointError: a file is missing or holds other bytes than were written.
        Others: what is there is no checkpoint of ours.
    """
    manifest = read_manifest(path)
    values: dict[str, Any] | None = None
    tensors: dict[str, dict[str, Any]] = {}
    for name, file, facts in _files(path, manifest, progress):
        if name == VALUES:
            values = json.loads(read(file, facts, progress).numpy().tobytes())
        elif name.endswith(".safetensors"):
            tensors.setdefault(group_of(name), {}).update(read_tensors(file, facts, progress))
        progress()
    if not isinstance(values, dict):
        raise ValueError(f"no {VALUES}")
    return StateDict(tensors, values)


def verify(path: Path, progress: Callable[[], None]) -> None:
    """Read every byte of a checkpoint. Errors: see `read_state`."""
    for _, file, facts in _files(path, read_manifest(path), progress):
        read(file, facts, progress)


def _files(path: Path, manifest: Mapping[str, Any], progress: Callable[[], None]) -> list[tuple[str, Path, Facts]]:
    found = []
    for name, entry in manifest["files"].items():
        if name != Path(name).name:
            raise ValueError(f"{name!r} is no name of a file")
        file, size = path / name, int(entry["bytes"])
        if manifest["format"] == 1:
            found.append((name, file, _facts_of_format_1(file, size, entry[_FORMAT_1_CHECKSUM], progress)))
        else:
            found.append((name, file, Facts(size, entry[CHECKSUM])))
    return found


def _facts_of_format_1(file: Path, size_bytes: int, sha256: str, progress: Callable[[], None]) -> Facts:
    """Verify a file by its SHA-256; its facts as format 2 would have them."""
    if not file.is_file() or file.stat().st_size != size_bytes:
        return Facts(size_bytes, "")  # whoever reads it says what is wrong
    data = file.read_bytes()
    progress()
    if hashlib.sha256(data).hexdigest() != sha256:
        raise CheckpointError(
            f"{file} is damaged",
            expected=f"{size_bytes} bytes with SHA-256 {sha256[:12]}...",
            found="other bytes",
            next_step="resume from another checkpoint",
        )
    return Facts(size_bytes, checksum(data))


def _own_checksum(content: Mapping[str, Any]) -> str:
    return checksum(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
