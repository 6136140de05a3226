"""Checkpoints on disk: whole or not there.

A checkpoint is a directory ``step-000100`` of safetensors files, `state.json` and a manifest with a checksum a file.
It is written under a temporary name beside its place, fsynced and renamed. Reading verifies every byte.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch

from hvdtrain.durable import fsync
from hvdtrain.errors import CheckpointError
from hvdtrain.state.train_state import StateDict

FORMAT = 1
MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{6,})(?:\.(\d+))?")


@dataclass(frozen=True, order=True)
class Saved:
    """A checkpoint that is on disk, whole or not.

    Attributes:
        step: optimizer steps done.
        again: 0, or counted up where the step was saved again after a resume from before it.
        path: its directory.
    """

    step: int
    again: int
    path: Path


class CheckpointStore:
    """The checkpoints of one run; used on rank 0 alone.

    Args:
        directory: ``RUN/checkpoints``, made when the first is saved.
        warn: told of what was passed over.
        progress: called with each file, and each MiB of it that is verified, so that who watches sees it go on.
    """

    def __init__(
        self, directory: Path, warn: Callable[[str], None], progress: Callable[[], None] = lambda: None
    ) -> None:
        self.directory = directory
        self.progress = progress
        self._warn = warn

    def list(self) -> list[Saved]:
        """All checkpoints, oldest first, unverified."""
        found = []
        if self.directory.is_dir():
            for path in self.directory.iterdir():
                match = _NAME.fullmatch(path.name)
                if match and path.is_dir():
                    found.append(Saved(int(match[1]), int(match[2] or 0), path))
        return sorted(found)

    def save(self, step: int, state: StateDict, notes: Mapping[str, Any]) -> Path:
        """Write a checkpoint; its path. Nothing that was there before is touched, whatever happens.

        Args:
            step: optimizer steps done.
            state: tensors on any device.
            notes: plain values for the manifest (`heldout_loss` decides which checkpoint is the best).

        Errors:
            CheckpointError: the disk is full or cannot be written; the temporary directory is removed.
        """
        temporary = self.directory / f".writing-step-{step:06d}-{os.getpid()}"
        shutil.rmtree(temporary, ignore_errors=True)  # of a killed process that had the same number
        try:
            temporary.mkdir(parents=True)
            _write(temporary, step, state, notes, self.progress)
            target = self._free_name(step)
            temporary.rename(target)
            fsync(self.directory)
        except (OSError, safetensors.SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written: {getattr(error, 'strerror', None) or error}",
                found=f"in {self.directory}",
                next_step="make room or give another --run_dir; earlier checkpoints are untouched",
            ) from error
        return target

    def load_newest(self) -> tuple[Saved, StateDict] | None:
        """The newest checkpoint that is whole; damaged ones are named and passed over. None where there is none."""
        for saved in reversed(self.list()):
            try:
                return saved, load(saved.path, self.progress)
            except CheckpointError as error:
                self._warn(f"passing over a damaged checkpoint: {error.what}")
        return None

    def set_aside_after(self, last: Saved | None) -> None:
        """Rename what is newer than `last` (None: everything), so that it is neither loaded nor counted any more.

        These are damaged, or of a way that was left when an older one was resumed. They stay on disk.
        """
        for saved in self.list():
            if last is None or (saved.step, saved.again) > (last.step, last.again):
                place = next(
                    path
                    for number in itertools.count()
                    if not (path := saved.path.with_name(f"set-aside-{number}-{saved.path.name}")).exists()
                )
                saved.path.rename(place)
                self._warn(f"{saved.path.name} is set aside as {place}; remove it when you don't need it")

    def retain(self, keep: int, just_saved: Path) -> None:
        """Remove all but the newest `keep` checkpoints, `just_saved`, and the one with the lowest held-out loss.

        What an earlier process left half written is removed too.
        """
        every = self.list()
        kept = {just_saved, *(saved.path for saved in every[-keep:])}
        losses = [(loss, saved.path) for saved in every if (loss := _heldout_loss(saved.path)) is not None]
        if losses:
            kept.add(min(losses)[1])
        for saved in every:
            if saved.path not in kept:
                # Renamed first: a directory that is removed half way must not look like a checkpoint.
                doomed = saved.path.with_name(f".removing-{saved.path.name}")
                saved.path.rename(doomed)
        for leftover in [*self.directory.glob(".removing-*"), *self.directory.glob(".writing-*")]:
            shutil.rmtree(leftover, ignore_errors=True)

    def _free_name(self, step: int) -> Path:
        again = max((saved.again + 1 for saved in self.list() if saved.step == step), default=0)
        return self.directory / (f"step-{step:06d}" + (f".{again}" if again else ""))


def load(path: Path, progress: Callable[[], None] = lambda: None) -> StateDict:
    """Read and verify one checkpoint; tensors on the CPU. `progress`: see `CheckpointStore`.

    Errors:
        CheckpointError: a file is missing, was cut, cannot be read, or holds other bytes than were written.
    """
    try:
        return _load(path, _manifest(path), progress)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"{path} is damaged", found=repr(error), next_step="resume from another checkpoint"
        ) from error


def _load(path: Path, manifest: Mapping[str, Any], progress: Callable[[], None]) -> StateDict:
    for name, facts in manifest["files"].items():
        file = path / name
        whole = file.is_file() and file.stat().st_size == facts["bytes"]
        if not whole or _checksum(file, progress) != facts["sha256"]:
            raise CheckpointError(
                f"{file} is damaged",
                expected=f"{facts['bytes']} bytes with SHA-256 {facts['sha256'][:12]}...",
                found=f"{file.stat().st_size} bytes" if file.is_file() else "no file",
                next_step="resume from another checkpoint",
            )
    values = json.loads((path / "state.json").read_text())
    groups = [name for name in manifest["files"] if name.endswith(".safetensors")]
    tensors = {}
    for group in groups:
        tensors[Path(group).stem] = safetensors.torch.load_file(path / group)
        progress()
    return StateDict(tensors, values)


def _write(
    directory: Path, step: int, state: StateDict, notes: Mapping[str, Any], progress: Callable[[], None]
) -> None:
    for group, tensors in state.tensors.items():
        contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        safetensors.torch.save_file(contiguous, directory / f"{group}.safetensors")
        progress()
    (directory / "state.json").write_text(json.dumps(dict(state.values)))
    names = sorted(path.name for path in directory.iterdir())
    files = {}
    for name in names:
        file = directory / name
        files[name] = {"bytes": file.stat().st_size, "sha256": _checksum(file, progress)}
    manifest = {"format": FORMAT, "step": step, **notes, "files": files}
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for name in (*names, MANIFEST):
        fsync(directory / name)
        progress()
    fsync(directory)


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is damaged: its {MANIFEST} cannot be read",
            found=str(error),
            next_step="give the directory of a checkpoint, such as RUN/checkpoints/step-000100",
        ) from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has a format that this version does not read",
            expected=f"format {FORMAT}",
            found=str(manifest.get("format") if isinstance(manifest, dict) else manifest)[:80],
        )
    return manifest


def _heldout_loss(path: Path) -> float | None:
    try:
        return _manifest(path).get("heldout_loss")
    except CheckpointError:
        return None


def _checksum(path: Path, progress: Callable[[], None]) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            progress()
    return digest.hexdigest()
