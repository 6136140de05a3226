"""Claim the folder of a store that gets copies of a run, and continue the run that it has. Used on rank 0 only."""

from __future__ import annotations

import logging
from pathlib import Path

from hvdtrain.config.parse import RunConfig
from hvdtrain.errors import CheckpointError, UnusableRunDirectoryError
from hvdtrain.object_store import StoreFolder
from hvdtrain.state.checkpoint_store import CheckpointStore, Measure, Saved
from hvdtrain.state.store_lease import take_store_lease
from hvdtrain.state.stored_run import StoredRun
from hvdtrain.training.start.run_directory import RunDirectory, unusable

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
