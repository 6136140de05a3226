"""Resume a run: from the memory of a rank, or from a checkpoint."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import allgather_json, broadcast_json, on_rank_0
from hvdtrain.config.parse import RunConfig, list_changes
from hvdtrain.engine.periodic import KEY as WORKERS
from hvdtrain.engine.periodic import PeriodicEngine, without_workers
from hvdtrain.engine.saved_exchange import of_rank
from hvdtrain.errors import CheckpointError
from hvdtrain.observe.past_journal import damaged_lines, last_step
from hvdtrain.observe.shell_commands import relative_to_start
from hvdtrain.observe.sinks import Recorder
from hvdtrain.run_layout import RunLayout
from hvdtrain.runtime.clock import steady_s
from hvdtrain.state.buddies import pool_state
from hvdtrain.state.checkpoint_store import MANIFEST, CheckpointStore, Saved
from hvdtrain.state.extras import unused
from hvdtrain.state.pieces import StateDict, named_like
from hvdtrain.state.read_together import Read, find_together
from hvdtrain.state.sync import broadcast_state
from hvdtrain.training.diagnostics.drift import check_equal
from hvdtrain.training.elastic.worker_state import NOTHING, WorkerState
from hvdtrain.training.round import Round
from hvdtrain.training.start.resume_checks import check_checkpoints_are_there, learning_rate_change
from hvdtrain.training.start.run_directory import RunDirectory

_Search = tuple[str, list[Saved], tuple[Saved, StateDict] | None]
"""What `resume` asks for, the checkpoints of the run before, and what was found."""


def resume_state(current: Round) -> int:
    """Give all ranks the state of the run; return the step to resume from. Collective: yes.

    The newest state in the memory of any rank counts. If no rank has one, rank 0 loads what `resume` asks for. Where
    ranks hold pieces, it is the newest commit that has lost none.

    Errors: CheckpointError, LaunchError, DriftError, LostStateError: on every rank.
    """
    worker, comm, claim, recorder = current.worker, current.comm, current.claim, current.recorder
    state, touch = worker.state, current.spans.touch
    offers = allgather_json(comm, worker.offer(), name="state/offers")
    steps = [step for step, _ in offers]
    newest = max(steps)
    if newest == NOTHING:
        loaded: list[StateDict] = []
        found, parts = find_together(partial(_find, current), state, comm, touch)
        resumed = on_rank_0(comm, partial(_restore, current, loaded, found), name="restored")
        placed = worker.plan.places_model
        source_state, fitting = loaded[0] if loaded else None, partial(_of_rank, current)
        parts = parts if len(loaded) < 2 else None  # then the state is another one than that in the files
        broadcast_state(state, comm, touch, source=source_state, placed=placed, parts=parts, own=fitting)
    else:
        if current.engine is not None and current.engine.in_pieces:
            chosen = pool_state(state, worker.commits.held(), comm, touch)
            newest, source = chosen.step, chosen.root
        else:
            source = steps.index(newest)
            if offers.count(offers[source]) < comm.size:
                broadcast_state(state, comm, touch, root=source)
        last = worker.last_record
        if steps[0] < newest:
            last = broadcast_json(comm, last, name="state/last", root=source)
        if claim is not None and last and last_step(claim.layout.journal) < newest == last["step"]:
            recorder.step(dict(last))  # rank 0 was behind, or the former rank 0 is lost
        if claim is not None:
            _write_missing_config(current.run, claim, recorder)
        check_equal(state.model, comm, name="drift")
        _report_resumed(worker, comm, recorder)
        resumed = newest
    worker.step = resumed
    return int(resumed)


def _write_missing_config(run: RunConfig, claim: RunDirectory, recorder: Recorder) -> None:
    """On rank 0: write the config if the run folder is new, on a disk that other hosts do not share."""
    if claim.layout.config.exists():
        return
    recorder.warn(
        f"{claim.path} is new on {socket.gethostname()}, where rank 0 runs now: earlier files of the run are on the"
        " host of the former rank 0, and new checkpoints are written here; use a --run_dir that all hosts share"
    )
    with suppress(OSError):  # a full disk does not end training
        claim.write_config(run)


def _report_resumed(worker: WorkerState, comm: Comm, recorder: Recorder) -> None:
    """Report from where in memory the run resumes, and how long it had no step, if this process knows."""
    progress = worker.state.progress
    facts: dict[str, Any] = {"from": "memory", "step": progress.step, "position": progress.position, "size": comm.size}
    since = ""
    if worker.last_record is not None:
        facts["without_step_s"] = steady_s() - worker.last_record["time"]
        since = f", {facts['without_step_s']:.2f} s after the last step's end"
    recorder.event({"event": "resumed", **facts})
    recorder.say(f"resuming from step {progress.step} with {comm.size} rank(s){since}")


def _restore(current: Round, loaded: list[StateDict], find: Callable[[], _Search]) -> int:
    """On rank 0: load what was found, report changes, write the config; return the step to resume from.

    If rank 0 holds only pieces of the state, it also appends the whole state to `loaded`, then the one in the files if
    that is another one.

    Errors: CheckpointError: the checkpoint is missing, damaged, or of another model.
    """
    run, worker, recorder = current.run, current.worker, current.recorder
    claim, store = current.claim, current.store
    assert store is not None and claim is not None
    state, old = worker.state, claim.old_config()
    resume, saves, found = find()
    if found is None and not saves and resume != "never":
        check_checkpoints_are_there(claim, store)
    own = found is not None and found[0].path.resolve().is_relative_to(store.directory.resolve())
    store.set_aside_after(found[0] if found is not None and own else None)
    if found is not None:
        saved, stored = found
        fitting_workers = _with_fitting_workers(current, stored)
        snapshot = named_like(fitting_workers, state.model.state_dict())
        samples, data_id = state.progress.samples, state.progress.data_id
        state.load_state_dict(fitting := _of_rank(current, snapshot))
        if fitting is not snapshot or (current.engine is not None and current.engine.in_pieces):
            loaded += [snapshot] if fitting_workers is stored else [snapshot, stored]
        recorder.event(
            {"event": "resumed", "from": str(saved.path), "step": saved.step, "position": state.progress.position}
        )
        recorder.say(f"resuming from step {saved.step} ({relative_to_start(saved.path, worker.info)})")
        if lost := unused(state.extras, snapshot):
            recorder.warn(f"the state of callbacks that this run does not have is dropped: {', '.join(lost)}")
        if change := learning_rate_change(worker):
            recorder.warn(change)
        if (state.progress.samples, state.progress.data_id) != (samples, data_id):
            before = state.progress.samples
            counts = f" ({before:,} samples before, {samples:,} now)" if before != samples else ""
            recorder.warn(f"the training data has changed{counts}: from now on the order is that of the new data")
            state.progress.samples, state.progress.data_id = samples, data_id
    elif saves and resume != "never":
        recorder.warn(
            f"STEPS 1 TO {saves[-1].step:,} ARE LOST: none of the run's {len(saves)} checkpoint(s) can be read, so"
            f" training starts again at step 1. The checkpoints stay, as set-aside-... in {store.directory}. To use"
            " another checkpoint, stop the run and give --resume PATH"
        )
    if changed := list_changes(old, run.resolved) if old is not None else []:
        recorder.event({"event": "config_changed", "changes": changed})
        recorder.warn("the config has changed since the last start of the run:\n  " + "\n  ".join(changed))
    if damaged := damaged_lines(claim.layout.journal):
        recorder.warn(
            f"{len(damaged)} line(s) of {claim.layout.journal} cannot be read, the first is line {damaged[0]}: they are"
            " ignored. Training does not need them, but reports and curves lack these steps and events"
        )
    if found is not None and own and state.progress.step >= current.stop:
        claim.mark_job()  # nothing to train: keep the config of the training that was done
    else:
        claim.write_config(run)
    return state.progress.step


def _of_rank(current: Round, saved: StateDict) -> StateDict:
    return saved if current.engine is None else of_rank(saved, current.engine, current.comm)


def _with_fitting_workers(current: Round, snapshot: StateDict) -> StateDict:
    """Return a state that this run's engine can load: that of other workers, or of none here, is averaged."""
    stored, engine = snapshot.values.get("exchange") or {}, current.engine
    own = engine.links.workers.count if isinstance(engine, PeriodicEngine) else 0
    if not stored.get("begun") or stored[WORKERS] == own:
        return snapshot
    current.recorder.warn(
        f"the checkpoint has {stored[WORKERS]} workers, and this run {own or 'none'}: it continues from the parameters"
        " of the last outer step, with the mean state of their optimizers"
    )
    return without_workers(snapshot)


def _find(current: Round, read: Read) -> _Search:
    """On rank 0: find what `resume` asks for. Errors: those of `_restore`."""
    assert current.claim is not None and current.store is not None
    resume, saves = current.claim.resolve_resume(current.run.config.resume), current.store.list()
    return resume, saves, _checkpoint(resume, current.store, current.recorder, read)


def _checkpoint(resume: str, store: CheckpointStore, recorder: Recorder, read: Read) -> tuple[Saved, StateDict] | None:
    if resume == "never":
        return None
    if resume == "auto":
        return store.load_newest(read)
    path = Path(resume)
    if not path.resolve().is_relative_to(store.directory.parent.resolve()):
        own = store.load_newest(read)
        if own is not None:  # the same command again: the run has saved since it began from `path`
            recorder.say(f"ignoring --resume {resume}: the run has newer checkpoints of its own")
            return own
    if (path / MANIFEST).exists():
        snapshot = read(path)
        foreign = Saved(snapshot.values["progress"]["step"], 0, path)
        return next((saved for saved in store.list() if saved.path.resolve() == path.resolve()), foreign), snapshot
    found = CheckpointStore(RunLayout(path).checkpoints, recorder.warn, store.progress).load_newest(read)
    if found is None:
        raise CheckpointError(
            f"--resume {resume}: no valid checkpoint found there",
            expected="auto, never, a checkpoint such as RUN/checkpoints/step-000100, or a run folder",
        )
    return found
