"""Build the parts of a round of training; each part is complete when it is made."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

from hvdtrain.comm.base import Comm
from hvdtrain.comm.rounds import Rounds
from hvdtrain.compression.table import parse
from hvdtrain.config.parse import RunConfig
from hvdtrain.data.loader import Stream
from hvdtrain.engine.base import Engine
from hvdtrain.engine.exchange import ExchangeEngine
from hvdtrain.engine.make import make_engine
from hvdtrain.observe.live_window import LiveWindow
from hvdtrain.observe.recorder import Recorder
from hvdtrain.run_layout import RunLayout
from hvdtrain.runtime.host import read_host
from hvdtrain.spans import Spans
from hvdtrain.state.checkpoint_store import CheckpointStore
from hvdtrain.state.ledger import Ledger
from hvdtrain.training.diagnostics.drift import Drift
from hvdtrain.training.diagnostics.step_checks import StepChecks
from hvdtrain.training.elastic.roll_back import RollBack
from hvdtrain.training.elastic.worker_state import WorkerState
from hvdtrain.training.loop.feed import Feed
from hvdtrain.training.loop.saving import Saving
from hvdtrain.training.loop.shared_buffers import SharedBuffers
from hvdtrain.training.loop.step import Stepper
from hvdtrain.training.loop.step_sums import CombinedSums
from hvdtrain.training.loop.trainer import Trainer
from hvdtrain.training.records.compute import FirstPass
from hvdtrain.training.records.gradient_times import GradientTimes, ReadyTimes
from hvdtrain.training.start.auto_compression import CompressionTrial
from hvdtrain.training.start.opening import ClaimWatch
from hvdtrain.training.start.run_directory import RunDirectory
from hvdtrain.training.start.schedule import stop_step


def build_engine(
    run: RunConfig, worker: WorkerState, comm: Comm, layout: RunLayout, recorder: Recorder, spans: Spans
) -> Engine:
    """Make the round's engine, with the exchange state of the last round. Collective: yes."""
    parallel, variables, model = run.config.parallel, worker.info.variables, worker.state.model
    is_timed = comm.rank == 0 and run.config.observe.timeline != "off"
    # Its hooks must run before those of the engine.
    ready = ReadyTimes(model, spans, on_cuda=worker.device.type == "cuda") if is_timed else None
    try:
        engine = make_engine(
            worker.state.optimizer, model, comm, parallel.compression, spans, parallel.bucket_mib, variables
        )
        worker.use_exchange(engine)
    except BaseException:
        if ready is not None:
            ready.close()
        raise
    if ready is not None:
        path, host = layout.timeline.gradients, read_host(variables)
        recorder.add_watcher(GradientTimes(ready, engine, comm, spans, path, recorder.warn, host))
    return engine


def build_trainer(
    run: RunConfig,
    worker: WorkerState,
    rounds: Rounds,
    comm: Comm,
    engine: Engine,
    layout: RunLayout,
    store: CheckpointStore | None,
    claim: RunDirectory | None,
    recorder: Recorder,
    spans: Spans,
    live: LiveWindow,
    *,
    is_new: bool,
) -> Trainer:
    """Make the trainer of a round, after the state of the run is restored.

    Args:
        run: the options.
        worker: state of this process.
        rounds: says when the round is over.
        comm: the ranks.
        engine: of the round.
        layout: of the run folder.
        store: on rank 0; None elsewhere.
        claim: to the run folder, on rank 0; None elsewhere.
        recorder: of this rank.
        spans: of the training thread.
        live: opens windows of traces on request.
        is_new: whether the recorder is new, so that it lacks the FLOPs of a sample.
    """
    config, train, task, device = run.config, run.config.train, worker.task, worker.device
    model, on_cuda = worker.state.model, device.type == "cuda"
    buffers = SharedBuffers(model, comm, config.parallel.buffers, recorder.say)
    stepper = Stepper(
        task=task,
        model=model,
        engine=engine,
        comm=comm,
        precision=worker.precision,
        device=device,
        global_batch=train.global_batch,
        clip=train.clip,
        spans=spans,
        buffers=buffers,
        around=FirstPass(config, device, comm.size, recorder.event) if comm.rank == 0 and is_new else nullcontext,
    )
    stream = Stream(task.train_data, config.seed, train.global_batch, train.micro_batch, comm.rank, comm.size)
    ledger = Ledger(layout.ledger, recorder.warn)
    feed = Feed(config, comm, stream, ledger, spans, task.collate, on_cuda)
    needs_commits = partial(_loses_residuals, rounds, engine)
    roll_back = RollBack(
        config.elastic.roll_back, worker.commits, comm, store, recorder.event, recorder.warn, needs_commits
    )
    drift = Drift(worker.state, comm, train.check_every, buffers, recorder.warn)
    trial = None
    if isinstance(engine, ExchangeEngine) and engine.undecided:
        batch, host = (train.global_batch, train.micro_batch), read_host(worker.info.variables)
        trial = CompressionTrial(engine, comm, device, host, batch, recorder.event, recorder.say)
    return Trainer(
        config=config,
        comm=comm,
        rounds=rounds,
        state=worker.state,
        stepper=stepper,
        feed=feed,
        schedule=worker.schedule,
        base_lrs=worker.base_lrs,
        horizon=worker.horizon,
        stop=stop_step(train, worker.horizon),
        saving=Saving(
            config,
            comm,
            worker.state,
            stepper,
            store,
            ledger,
            roll_back,
            recorder.event,
            recorder.warn,
            worker.evaluations,
        ),
        observer=recorder,
        step_checks=StepChecks(stepper, feed, train.max_skipped, recorder.event, recorder.warn),
        roll_back=roll_back,
        on_step=trial.add_step if trial is not None else lambda record: None,
        sums=CombinedSums(live, drift, ClaimWatch(claim, comm)),
    )


def _loses_residuals(rounds: Rounds, engine: Engine) -> bool:
    """Return whether losing a rank loses the residuals that its compression has not delivered yet."""
    return rounds.elastic and parse(engine.compression).kind.feedback
