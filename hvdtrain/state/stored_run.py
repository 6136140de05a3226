"""The copy of a run on a store, with the names of a run folder: its checkpoints, journal, config and ledger.

::

    checkpoints/step-000100/*                 the files of a checkpoint
    checkpoints/step-000100/manifest.json     written last: with it, the checkpoint is complete
    checkpoints/step-000200/set-aside.json    the manifest of a checkpoint that is obsolete
    journal.jsonl  config.yaml  ledger/*  ... as they were at the newest copy
    .lease/                                   see `training.start.store_target`
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from hvdtrain.errors import CheckpointError, UnreachableStoreError
from hvdtrain.files import fsync_folder
from hvdtrain.object_store import StoreFolder
from hvdtrain.run_layout import RunLayout
from hvdtrain.state.checkpoint_store import Measure, Saved, saved_at
from hvdtrain.state.manifest import MANIFEST, read_manifest, verify
from hvdtrain.state.shard_files import discard, temporary_name

_CHECKPOINTS = "checkpoints"
_SET_ASIDE = "set-aside.json"


class StoredRun:
    """The copy of a run in a folder of a store. Used on rank 0 only; errors are those of `StoreFolder`."""

    def __init__(self, folder: StoreFolder, best: Measure) -> None:
        self.folder, self._best = folder, best
        self._done: dict[tuple[str, str], int] = {}  # local files that were copied: their time of change in ns
        self._scores: dict[str, float | None] = {}  # of complete checkpoints, by name

    @property
    def url(self) -> str:
        """The address of the folder."""
        return self.folder.url

    def list(self) -> list[Saved]:
        """List the complete checkpoints, oldest first. Their paths are those in the folder."""
        names = (name.split("/") for name in self.folder.sizes(_CHECKPOINTS))
        whole = [parts[1] for parts in names if len(parts) == 3 and parts[2] == MANIFEST]
        return sorted(saved for name in whole if (saved := saved_at(Path(_CHECKPOINTS, name))) is not None)

    def has_same(self, path: Path) -> bool:
        """Return whether the store has the complete checkpoint that is in the folder `path`."""
        here = f"{_CHECKPOINTS}/{path.name}/{MANIFEST}"
        return here in self.folder.sizes(_CHECKPOINTS) and self.folder.read(here) == (path / MANIFEST).read_bytes()

    def upload(self, path: Path, progress: Callable[[], None]) -> int:
        """Copy the checkpoint in the folder `path`, its manifest last; return its number of bytes.

        Another try continues with the files that are missing.

        Errors: CheckpointError: the checkpoint is damaged; OSError: it cannot be read.
        """
        place, content = f"{_CHECKPOINTS}/{path.name}", (path / MANIFEST).read_bytes()
        wanted = {name: int(about["bytes"]) for name, about in read_manifest(path)["files"].items()}
        self._scores.pop(path.name, None)
        found = self.folder.sizes(place)
        if f"{place}/{MANIFEST}" in found:  # of a checkpoint with this name that is obsolete
            self.folder.remove([f"{place}/{MANIFEST}"])
        for name in wanted:
            file, at_ns = path / name, (path / name).stat().st_mtime_ns
            if self._done.get((place, name)) != at_ns or found.get(f"{place}/{name}") != wanted[name]:
                self.folder.upload(file, f"{place}/{name}")
                self._done[place, name] = at_ns
            progress()
        found = self.folder.sizes(place)
        if wrong := [name for name in wanted if found.get(f"{place}/{name}") != wanted[name]]:
            self._done = {key: value for key, value in self._done.items() if key[0] != place}
            raise UnreachableStoreError(
                f"{self.url}/{place}/{wrong[0]} is not what was written",
                expected=f"{wanted[wrong[0]]} bytes",
                found=f"{found.get(f'{place}/{wrong[0]}', 'no such object')}",
            )
        self.folder.write(f"{place}/{MANIFEST}", content)
        self._done = {key: value for key, value in self._done.items() if key[0] != place}
        return sum(wanted.values())

    def upload_records(self, layout: RunLayout) -> None:
        """Copy the journal and the other records of the run folder that have changed."""
        files = [layout.config, layout.identity, layout.failure_text, layout.failure_json]
        inside = [path for folder in (layout.ledger, layout.tensorboard) for path in folder.rglob("*")]
        for path in filter(Path.is_file, (*files, *inside, layout.journal)):
            with suppress(FileNotFoundError):  # removed since it was listed
                name, at_ns = path.relative_to(layout.folder).as_posix(), path.stat().st_mtime_ns
                if self._done.get(("", name)) != at_ns:
                    self.folder.upload(path, name)
                    self._done["", name] = at_ns

    def remove_old(self, keep: int, just_copied: str) -> None:
        """Remove all but the newest `keep` checkpoints, `just_copied`, the best one, and what was set aside."""
        every = self.list()
        kept = {just_copied, *(saved.path.name for saved in every[-keep:])}
        if (best := self.find_best(every)) is not None:
            kept.add(best.path.name)
        files: dict[str, list[str]] = {}
        for name in self.folder.sizes(_CHECKPOINTS):
            files.setdefault(name.split("/")[1], []).append(name)
        for step, names in files.items():
            if step not in kept and f"{_CHECKPOINTS}/{step}/{_SET_ASIDE}" not in names:
                names.sort(key=lambda name: not name.endswith(f"/{MANIFEST}"))  # first, so that it is complete or not
                self.folder.remove(names)

    def find_best(self, every: Sequence[Saved]) -> Saved | None:
        """Return the one with the lowest score of these checkpoints; None if none has one."""
        found = {saved: score for saved in every if (score := self._score(saved)) is not None}
        return min(found, key=found.__getitem__, default=None)

    def set_aside_after(self, last: tuple[int, int]) -> Sequence[str]:
        """Make the checkpoints after step and repetition `last` incomplete, and return their names.

        They are damaged, or obsolete because an older one was resumed. Their files stay.
        """
        late = [saved for saved in self.list() if (saved.step, saved.again) > last]
        for saved in late:
            self.folder.copy(f"{saved.path}/{MANIFEST}", f"{saved.path}/{_SET_ASIDE}")
            self.folder.remove([f"{saved.path}/{MANIFEST}"])
        return [saved.path.name for saved in late]

    def download(self, saved: Saved, directory: Path) -> None:
        """Copy a checkpoint into `directory`, and verify it there.

        Errors: CheckpointError: it is damaged; OSError: the disk is full, for example.
        """
        folder = directory / temporary_name(saved.step)
        folder.mkdir(parents=True)
        try:
            for name in self.folder.sizes(str(saved.path)):
                self.folder.download(name, folder / name.rpartition("/")[2])
            try:
                verify(folder, lambda: None)
            except (ValueError, KeyError, TypeError) as error:
                raise CheckpointError(f"{self.url}/{saved.path} is damaged", found=repr(error)) from error
            fsync_folder(folder)
            folder.rename(directory / saved.path.name)
        except BaseException:
            discard(folder)
            raise

    def download_records(self, layout: RunLayout) -> None:
        """Copy the journal and the other records into a new run folder. Errors: OSError too."""
        for name in self.folder.sizes():
            if name.split("/")[0] not in (_CHECKPOINTS, ".lease") and ".." not in name.split("/"):
                path = layout.folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                self.folder.download(name, path)

    def _score(self, saved: Saved) -> float | None:
        name = saved.path.name
        if name not in self._scores:
            try:
                manifest = json.loads(self.folder.read(f"{saved.path}/{MANIFEST}"))
                self._scores[name] = self._best.score(manifest.get("heldout_loss"), manifest.get("metrics") or {})
            except (ValueError, TypeError, AttributeError):
                self._scores[name] = None
        return self._scores[name]
