"""The folder of a store that gets copies of a run: its lease, and the run that it has. Used on rank 0 only.

The folder ``.lease`` has objects with consecutive numbers. A job takes the lease by creating the next number, which
only one can do where the store has conditional writes; the holder of the highest number has the lease.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvdtrain.config.parse import RunConfig, list_changes
from hvdtrain.errors import (
    CheckpointError,
    ConfigError,
    RunDirectoryError,
    StoreError,
    UnusableRunDirectoryError,
    listed,
)
from hvdtrain.lease import Lease, describe_holder, holder_lives
from hvdtrain.object_store import StoreFolder
from hvdtrain.state.checkpoint_store import CheckpointStore, Measure, Saved
from hvdtrain.state.stored_run import StoredRun
from hvdtrain.training.start.run_directory import RunDirectory, unusable
from hvdtrain.yaml_file import parse_yaml

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


log = logging.getLogger(__name__)

OPTION = "--checkpoint.to"


def claim_store(run: RunConfig, claim: RunDirectory) -> None:
    """Claim the store of the option, if it is given, until `claim` is released.

    Errors:
        ConfigError: a package is missing.
        StoreError: the store cannot be used; UnreachableStoreError: it does not answer.
        RunDirectoryError: another job uses it.
    """
    options = run.config.checkpoint
    if options.to is None:
        return
    scheme, _, path = options.to.partition("://")
    if scheme in ("file", "local") and Path(path).resolve() == claim.path.resolve():
        raise ConfigError(f"{OPTION} is the run folder itself", expected="another folder", found=options.to)
    folder = StoreFolder(options.to, OPTION)
    claim.stored = StoredRun(folder, Measure.parse(options.best))
    if options.lease:
        claim.store_lease = take_store_lease(folder, claim.job)


def fetch_run(run: RunConfig, claim: RunDirectory) -> None:
    """Download what the run folder lacks of the run on its store: the newest and the best checkpoint, and the records.

    Checkpoints that the run folder has are not looked at. A damaged one is skipped with a warning.

    Errors: those of `claim_store`; RunDirectoryError: the run folder cannot be written.
    """
    stored, resume = claim.stored, claim.resolve_resume(run.config.resume)
    if stored is None:
        return
    if resume not in ("auto", "never") and Path(resume).resolve().is_relative_to(claim.path.resolve()):
        return  # an older one of the run folder is asked for
    there = stored.list()
    if resume == "never" and there:
        raise UnusableRunDirectoryError(
            f"{stored.url} already has a run, and --resume never would mix another run into it",
            next_step=f"give another {OPTION}, or --resume auto to resume the run",
        )
    if there and not claim.layout.is_run:
        _check_same(run, claim, stored)
    local = CheckpointStore(claim.layout.checkpoints, log.warning).list()
    newest = (local[-1].step, local[-1].again) if local else (0, -1)
    newer = [saved for saved in reversed(there) if (saved.step, saved.again) > newest]
    try:
        if there and not claim.layout.is_run:
            stored.download_records(claim.layout)
        whole = next((saved for saved in newer if _download(stored, saved, claim)), None)
        best = stored.find_best(there)
        if best is not None and best != whole and not (claim.layout.checkpoints / best.path.name).exists():
            _download(stored, best, claim)
    except OSError as error:
        raise unusable(f"the run folder {claim.path}", error) from error


def _check_same(run: RunConfig, claim: RunDirectory, stored: StoredRun) -> None:
    """Check that the copies are of a run with this run folder's name, or with these options.

    Errors: UnusableRunDirectoryError: they are of another run.
    """
    try:
        identity = stored.folder.read(claim.layout.identity.name).decode()
        text = stored.folder.read(claim.layout.config.name)
    except StoreError:
        return  # it is older than these records
    config = parse_yaml(text, f"the config of {stored.url}", "the options of a run")
    theirs, own = (Path(str(each)).name if each else "" for each in (config.get("run_dir"), run.config.run_dir))
    if identity == run.identity() or (own and own == theirs):
        return
    raise UnusableRunDirectoryError(
        f"{stored.url} has the checkpoints of another run",
        expected="copies of this run, or none",
        found=listed(list_changes(config, run.resolved)) or "a run in another folder",
        next_step=f"give another {OPTION}" + (f"; to continue that run: --run_dir {theirs}" if theirs else ""),
    )


def fetch_checkpoint(stored: StoredRun, claim: RunDirectory, name: str) -> bool:
    """Download a checkpoint that is damaged in the run folder; return whether the store has a whole one."""
    return any(saved.path.name == name and _download(stored, saved, claim) for saved in stored.list())


def _download(stored: StoredRun, saved: Saved, claim: RunDirectory) -> bool:
    try:
        stored.download(saved, claim.layout.checkpoints)
    except CheckpointError as error:
        log.warning("skipping a checkpoint of %s: %s", stored.url, error.what)
        return False
    log.info("downloaded %s/%s", stored.url, saved.path)
    return True
