"""Going on where a run was: which checkpoint, and what is different since. Used on rank 0 alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.config.parse import RunConfig, changes
from hvdtrain.errors import CheckpointError
from hvdtrain.observe.recorder import Recorder
from hvdtrain.state.store import MANIFEST, CheckpointStore, Saved, load
from hvdtrain.state.train_state import StateDict, TrainState
from hvdtrain.training.run_directory import RunDirectory

CHECKPOINTS = "checkpoints"


def restore(
    run: RunConfig, state: TrainState, store: CheckpointStore | None, claim: RunDirectory | None, recorder: Recorder
) -> int:
    """On rank 0: load what `resume` asks for, say what changed, write the config; the step to go on from."""
    assert store is not None and claim is not None
    old = claim.old_config()
    found = _checkpoint(run.config.resume, store, recorder)
    own = found is not None and found[0].path.resolve().is_relative_to(claim.path.resolve())
    store.set_aside_after(found[0] if found is not None and own else None)
    if found is not None:
        saved, snapshot = found
        samples, data_id = state.progress.samples, state.progress.data_id
        state.load_state_dict(snapshot)
        recorder.event(
            {"event": "resumed", "from": str(saved.path), "step": saved.step, "position": state.progress.position}
        )
        recorder.say(f"going on from step {saved.step} ({saved.path})")
        if (state.progress.samples, state.progress.data_id) != (samples, data_id):
            recorder.warn(
                f"the training data is not that of the run so far ({state.progress.samples:,} samples then, {samples:,}"
                " now): from here on the order is that of the new data"
            )
            state.progress.samples, state.progress.data_id = samples, data_id
    _say_changes(old, run.resolved, recorder)
    claim.write_config(run)
    return state.progress.step


def _say_changes(old: Mapping[str, Any] | None, new: Mapping[str, Any], recorder: Recorder) -> None:
    changed = changes(old, new) if old is not None else []
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
    found = CheckpointStore(path / CHECKPOINTS, recorder.warn, store.progress).load_newest()
    if found is None:
        raise CheckpointError(
            f"--resume {resume}: no whole checkpoint there",
            expected="auto, never, a checkpoint such as RUN/checkpoints/step-000100, or a run directory",
        )
    return found


def _foreign(path: Path, snapshot: StateDict) -> Saved:
    return Saved(snapshot.values["progress"]["step"], 0, path)
