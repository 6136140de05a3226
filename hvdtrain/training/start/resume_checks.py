"""Checks before a run resumes, and advice on its learning rate; used on rank 0 only."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hvdtrain.config.parse import RunConfig, list_changes
from hvdtrain.config.schema import Config
from hvdtrain.errors import CheckpointError, ConfigError
from hvdtrain.observe.past_journal import read_events
from hvdtrain.run_layout import RunLayout
from hvdtrain.state.checkpoint_store import MANIFEST, CheckpointStore
from hvdtrain.training.elastic.worker_state import WorkerState
from hvdtrain.training.start.optimizers import stop_step
from hvdtrain.training.start.run_directory import RunDirectory, unusable


def check_files(claim: RunDirectory) -> None:
    """Check that the files in the run folder can be read and extended, before anything costs time.

    Errors: RunDirectoryError: the config, the journal or the folder of checkpoints cannot be used.
    """
    claim.old_config()
    log, folder = claim.layout.journal, claim.layout.checkpoints
    try:
        if os.path.lexists(log):
            log.open("r+b").close()
    except OSError as error:
        raise unusable(f"the journal {log}", error) from error
    try:
        if os.path.lexists(folder):
            list(folder.iterdir())
            tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        link = f" (a link to {folder.readlink()})" if folder.is_symlink() else ""
        raise unusable(f"the folder of checkpoints {folder}{link}", error) from error


def check_end(run: RunConfig, claim: RunDirectory, horizon: int) -> None:
    """Check that there is something to train, before anything is written to the run folder.

    The unchanged command of a finished run is allowed: it shows the result. `horizon`: total steps.

    Errors: ConfigError: the newest checkpoint is beyond the end of the run; or at its end, and other options have
    changed.
    """
    train = run.config.train
    step, is_own = newest_step(claim.resolve_resume(run.config.resume), claim.path)
    stop = stop_step(train, horizon)
    if step is None or step < stop:
        return
    limit, more = f"--train.steps {horizon}", f"--train.steps {step + stop}"
    if stop < horizon:
        limit = f"--train.stop_at {train.stop_at}"
        more = "--train.stop_at null" if horizon > step else f"--train.stop_at {step + stop}"
    elif train.epochs is not None:
        limit = f"--train.epochs {train.epochs:g}, which are {horizon} steps"
        more = f"--train.epochs {train.epochs * (step + stop) / stop:g}"
    if step > stop:
        raise ConfigError(
            f"nothing to train: the checkpoint is at step {step}, beyond the end of this run ({limit})",
            expected=f"an end after step {step}",
            next_step=f"to continue from step {step}: {more}; for a new run from step 1: --resume never --run_dir NEW",
        )
    old = claim.old_config()
    changed = list_changes(old, run.resolved) if old is not None else []
    if changed or not is_own:
        what = f"these options have changed: {'; '.join(changed)}" if changed else "no step is left"
        raise ConfigError(
            f"nothing to train: the checkpoint is at step {step}, the end of this run ({limit}), and {what}",
            expected="the options of that training, or a later end",
            next_step=f"to continue: --train.steps {2 * step}; for a new run with these options: --resume never"
            " --run_dir NEW",
        )


def newest_step(resume: str, folder: Path) -> tuple[int | None, bool]:
    """Return the step of the newest checkpoint that `resume` names, unread, and whether it is the run's own."""

    def last(place: Path) -> int | None:
        saves = CheckpointStore(RunLayout(place).checkpoints, lambda line: None).list()
        return saves[-1].step if saves else None

    own = last(folder)
    if resume == "never":
        return None, True
    path = Path(resume)
    is_within = path.resolve().is_relative_to(folder.resolve())
    if resume == "auto" or (own is not None and not is_within):
        return own, True
    if not (path / MANIFEST).exists():
        return last(path), is_within
    name = path.name.removeprefix("step-").partition(".")[0]
    return (int(name) if name.isdigit() else None), is_within


def options_to_continue(config: Config, worker: WorkerState) -> str:
    """Return the options that train for as many steps again, without a jump of the learning rate.

    If the schedule has lowered the learning rate, a longer schedule would raise it: then keep its last value.
    """
    train = config.train
    more = f"--train.steps {2 * worker.horizon}" if train.epochs is None else f"--train.epochs {2 * train.epochs:g}"
    lr = worker.base_lrs[0] * worker.schedule(max(0, worker.horizon - 1))
    if worker.task.optimizer is not None or worker.task.schedule is not None or lr == config.optimizer.peak_lr:
        return more
    return f"{more} --optimizer.schedule constant --optimizer.lr {lr:.6g}"


def check_checkpoints_are_there(claim: RunDirectory, store: CheckpointStore) -> None:
    """Refuse to restart a run that has saved checkpoints which cannot be found.

    Errors: CheckpointError: the journal records checkpoints, but there is none, not even a damaged one.
    """
    log = claim.layout.journal
    saved = max((int(event.get("at_step", 0)) for event in read_events(log, "checkpoint")), default=0)
    if saved:
        raise CheckpointError(
            f"{claim.path} has no checkpoint, though its journal records one at step {saved}",
            expected=f"step-... folders in {store.directory}",
            found=f"{'an empty folder' if store.directory.is_dir() else 'no folder'}",
            next_step="put the folder back (or its disk, if it is a link), or give --resume CHECKPOINT; for a new run:"
            " --resume never --run_dir NEW",
        )


def learning_rate_change(worker: WorkerState) -> str | None:
    """Describe a jump of the learning rate when a run resumes; None if there is none, or if no step is left."""

    def at(step: int) -> float:
        return worker.base_lrs[0] * worker.schedule(step)

    step, before = worker.state.progress.step, worker.state.progress.lr  # 0 if unknown
    if not before or not step or abs(at(step - 1) - before) <= 1e-6 * before or step >= worker.horizon:
        return None
    after = at(step)
    text = (
        f"the schedule has changed: the learning rate was {before:.4g} at step {step}, and is {after:.4g} at the next"
    )
    by_options = worker.task.optimizer is None and worker.task.schedule is None
    if by_options and after > 1.01 * before:
        text += (
            f"; to continue at {before:.4g}: --optimizer.schedule constant --optimizer.lr {before:.6g}; for runs that"
            " you may extend: --optimizer.schedule wsd, resumed from a checkpoint before its decay"
        )
    return text
