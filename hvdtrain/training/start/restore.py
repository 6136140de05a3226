"""Going on where a run was: from what a rank still holds in memory, or from which checkpoint."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import allgather_json, broadcast_json, on_rank_0
from hvdtrain.config.parse import RunConfig, list_changes
from hvdtrain.errors import CheckpointError
from hvdtrain.observe.past_journal import last_step
from hvdtrain.observe.recorder import Recorder
from hvdtrain.observe.shell_commands import relative_to_start
from hvdtrain.run_layout import RunLayout
from hvdtrain.runtime.clock import steady_s
from hvdtrain.state.checkpoint_store import MANIFEST, CheckpointStore, Saved, load
from hvdtrain.state.sync import broadcast_state
from hvdtrain.state.train_state import StateDict
from hvdtrain.training.diagnostics.health import check_equal
from hvdtrain.training.elastic.worker_state import NOTHING, WorkerState
from hvdtrain.training.start.resume_checks import check_checkpoints_are_there, learning_rate_change
from hvdtrain.training.start.run_directory import RunDirectory
from hvdtrain.training.start.schedule import stop_step


def take_over(
    run: RunConfig,
    kept: WorkerState,
    comm: Comm,
    store: CheckpointStore | None,
    claim: RunDirectory | None,
    recorder: Recorder,
    touch: Callable[[], None],
) -> int:
    """Make the state of all ranks that of the run; the step to go on from. Collective: yes.

    Of what ranks hold in memory the newest counts. Where none holds anything, rank 0 loads what `resume` asks for.

    Args:
        run: the options.
        kept: of this process; its state is changed.
        comm: the ranks.
        store: on rank 0; None elsewhere.
        claim: on rank 0; None elsewhere.
        recorder: of this rank.
        touch: called with each sign of progress.

    Errors:
        CheckpointError, LaunchError, DriftError: on every rank.
    """
    state = kept.state
    offers = allgather_json(comm, kept.offer(), name="state/offers")
    steps = [step for step, _ in offers]
    newest = max(steps)
    if newest == NOTHING:
        resumed = on_rank_0(comm, partial(restore, run, kept, store, claim, recorder), name="restored")
        broadcast_state(state, comm, touch)
    else:
        source = steps.index(newest)
        if offers.count(offers[source]) < comm.size:
            broadcast_state(state, comm, touch, root=source)
        last = broadcast_json(comm, kept.last, name="state/last", root=source) if steps[0] < newest else kept.last
        if claim is not None and last and last_step(claim.layout.journal) < newest == last["step"]:
            recorder.step(dict(last))  # it was done, but rank 0 had not come so far, or another was rank 0 and is gone
        if claim is not None:
            _move_in(run, claim, recorder)
        check_equal(state.model, comm, name="drift")
        _tell(kept, comm, recorder)
        resumed = newest
    kept.step = resumed
    return int(resumed)


def _move_in(run: RunConfig, claim: RunDirectory, recorder: Recorder) -> None:
    """On rank 0: see that the folder is that of the run, also where it is new, on a disk that no other host sees."""
    if claim.layout.config.exists():
        return
    recorder.warn(
        f"{claim.path} is new on {socket.gethostname()}, where rank 0 is now: what the run wrote so far is on the host"
        " where rank 0 was, and checkpoints come here from now on; give a --run_dir that all hosts share"
    )
    with suppress(OSError):  # a full disk ends no training
        claim.write_config(run)


def _tell(kept: WorkerState, comm: Comm, recorder: Recorder) -> None:
    """How the run goes on from memory, and for how long it stood still, as far as this process was there."""
    progress = kept.state.progress
    facts: dict[str, Any] = {"from": "memory", "step": progress.step, "position": progress.position, "size": comm.size}
    since = ""
    if kept.last is not None:
        facts["without_step_s"] = steady_s() - kept.last["time"]
        since = f", {facts['without_step_s']:.2f} s after the last step's end"
    recorder.event({"event": "resumed", **facts})
    recorder.say(f"going on from step {progress.step} with {comm.size} rank(s){since}")


def restore(
    run: RunConfig, kept: WorkerState, store: CheckpointStore | None, claim: RunDirectory | None, recorder: Recorder
) -> int:
    """On rank 0: load what `resume` asks for, say what changed, write the config; the step to go on from.

    Errors:
        CheckpointError: there is no checkpoint where there has to be one; it is damaged, or of another model.
    """
    assert store is not None and claim is not None
    state, old = kept.state, claim.old_config()
    resume, saves = claim.resumes(run.config.resume), store.list()
    found = _checkpoint(resume, store, recorder)
    if found is None and not saves and resume != "never":
        check_checkpoints_are_there(claim, store)
    own = found is not None and found[0].path.resolve().is_relative_to(store.directory.resolve())
    store.set_aside_after(found[0] if found is not None and own else None)
    if found is not None:
        saved, snapshot = found
        samples, data_id = state.progress.samples, state.progress.data_id
        state.load_state_dict(snapshot)
        recorder.event(
            {"event": "resumed", "from": str(saved.path), "step": saved.step, "position": state.progress.position}
        )
        recorder.say(f"going on from step {saved.step} ({relative_to_start(saved.path, kept.info)})")
        _tell_learning_rate(run, kept, recorder)
        if (state.progress.samples, state.progress.data_id) != (samples, data_id):
            recorder.warn(
                f"the training data is not that of the run so far ({state.progress.samples:,} samples then, {samples:,}"
                " now): from here on the order is that of the new data"
            )
            state.progress.samples, state.progress.data_id = samples, data_id
    elif saves and resume != "never":
        recorder.warn(
            f"NOTHING IS LEFT OF STEPS 1 TO {saves[-1].step:,}: none of the run's {len(saves)} checkpoint(s) can be"
            f" read, and training begins anew, at step 1. They are kept, as set-aside-... in {store.directory}. If that"
            " is not what you want, end the run, and give a checkpoint that is whole: --resume PATH"
        )
    _say_changes(old, run.resolved, recorder)
    if found is not None and own and state.progress.step >= stop_step(run.config.train, kept.horizon):
        claim.mark()  # there is nothing to train: the config stays that of what was trained
    else:
        claim.write_config(run)
    return state.progress.step


def _tell_learning_rate(run: RunConfig, kept: WorkerState, recorder: Recorder) -> None:
    progress, base = kept.state.progress, kept.base_lrs[0]
    by_options = kept.task.optimizer is None and kept.task.schedule is None
    change = learning_rate_change(
        progress.step, progress.lr, lambda step: base * float(kept.schedule(step)), by_options=by_options
    )
    if change is not None and progress.step < kept.horizon:
        recorder.warn(change)


def _say_changes(old: Mapping[str, Any] | None, new: Mapping[str, Any], recorder: Recorder) -> None:
    changed = list_changes(old, new) if old is not None else []
    if changed:
        recorder.event({"event": "config_changed", "changes": changed})
        recorder.warn("the config is not that of the run so far:\n  " + "\n  ".join(changed))


def _checkpoint(resume: str, store: CheckpointStore, recorder: Recorder) -> tuple[Saved, StateDict] | None:
    if resume == "never":
        return None
    if resume == "auto":
        return store.load_newest()
    path = Path(resume)
    if not path.resolve().is_relative_to(store.directory.parent.resolve()):
        own = store.load_newest()
        if own is not None:  # the same command again: it began from `path`, it goes on from what it has since saved
            recorder.say(f"the run has checkpoints of its own; --resume {resume} was where it began")
            return own
    if (path / MANIFEST).exists():
        snapshot = load(path, store.progress)
        return next((s for s in store.list() if s.path.resolve() == path.resolve()), _foreign(path, snapshot)), snapshot
    found = CheckpointStore(RunLayout(path).checkpoints, recorder.warn, store.progress).load_newest()
    if found is None:
        raise CheckpointError(
            f"--resume {resume}: no whole checkpoint there",
            expected="auto, never, a checkpoint such as RUN/checkpoints/step-000100, or a run directory",
        )
    return found


def _foreign(path: Path, snapshot: StateDict) -> Saved:
    return Saved(snapshot.values["progress"]["step"], 0, path)
