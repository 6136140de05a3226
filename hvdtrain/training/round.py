"""A round of a run, as the parts of training see it."""

from __future__ import annotations

from dataclasses import dataclass, field

from hvdtrain.comm.base import Comm
from hvdtrain.comm.rounds import Rounds
from hvdtrain.config.parse import RunConfig
from hvdtrain.engine.base import Engine
from hvdtrain.observe.failure.reporter import Reporter
from hvdtrain.observe.sinks import Recorder
from hvdtrain.run_layout import RunLayout
from hvdtrain.spans import Spans
from hvdtrain.state.checkpoint_store import CheckpointStore
from hvdtrain.state.store_copier import StoreCopier
from hvdtrain.training.elastic.worker_state import WorkerState
from hvdtrain.training.loop.sync_batch_norm import Statistics
from hvdtrain.training.start.optimizers import stop_step
from hvdtrain.training.start.run_directory import RunDirectory


@dataclass
class Round:
    """One round: from the join of its ranks to the end of training, or until the ranks change.

    `session.py` sets the attributes from `layout` on, in this order; those with a default may be asked for before.
    """

    run: RunConfig
    worker: WorkerState
    rounds: Rounds  # says when the round is over
    comm: Comm
    layout: RunLayout = field(init=False)
    claim: RunDirectory | None = field(init=False)  # to the run folder, on rank 0; None elsewhere
    spans: Spans = field(init=False)  # of the training thread
    reporter: Reporter | None = field(default=None, init=False)
    is_new: bool = field(init=False)  # whether the recorder is new, so that it lacks sinks and the FLOPs of a sample
    recorder: Recorder = field(init=False)
    store: CheckpointStore | None = field(default=None, init=False)  # of checkpoints, on rank 0; None elsewhere
    copier: StoreCopier | None = field(default=None, init=False)  # of checkpoints to a store, on rank 0; else None
    engine: Engine | None = field(default=None, init=False)  # exchange and optimizer
    batch_norm: Statistics | None = field(default=None, init=False)  # what synchronized batch norm shares; None without
    is_ending: bool = field(default=False, init=False)  # it needs no other rank any more

    @property
    def stop(self) -> int:
        """The step to stop at; the present one if a callback ends training."""
        if self.worker.callbacks.why is not None:
            return self.worker.state.progress.step
        return stop_step(self.run.config.train, self.worker.horizon)
