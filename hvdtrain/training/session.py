"""A run from its options to its result: every part is made here and handed to the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import on_rank_0
from hvdtrain.config.parse import RunConfig
from hvdtrain.data.loader import Stream, dataset_length
from hvdtrain.data.order import micro_batches
from hvdtrain.engine.exchange import ExchangeEngine
from hvdtrain.engine.make import check_compression, make_engine
from hvdtrain.observe import journal
from hvdtrain.observe.failure.reporter import Job
from hvdtrain.observe.failure.voice import Voice
from hvdtrain.observe.horovod_timeline import HorovodTimeline
from hvdtrain.observe.progress import Progress as ProgressDisplay
from hvdtrain.observe.recorder import Recorder
from hvdtrain.runtime.environment import NO_LAUNCHER, environ, rank_info
from hvdtrain.runtime.timeline import TimelinePlan
from hvdtrain.spans import Spans
from hvdtrain.state.store import CheckpointStore
from hvdtrain.state.sync import broadcast_state
from hvdtrain.state.train_state import Progress, TrainState
from hvdtrain.task.base import Task
from hvdtrain.training.auto_compression import CompressionTrial
from hvdtrain.training.compiled import compile_blocks
from hvdtrain.training.compute import FirstPass
from hvdtrain.training.device import pick_device
from hvdtrain.training.explain import explained
from hvdtrain.training.gradient_times import add_gradient_times
from hvdtrain.training.health import batch_statistics
from hvdtrain.training.held import held
from hvdtrain.training.make_task import make_task
from hvdtrain.training.notices import Notices
from hvdtrain.training.observers import (
    TIMELINE,
    add_horovod_timeline,
    add_listeners,
    add_sinks,
    add_tensorboard,
    add_watchers,
)
from hvdtrain.training.optimizers import make_optimizer
from hvdtrain.training.precision import Precision
from hvdtrain.training.report import report
from hvdtrain.training.restore import CHECKPOINTS, restore
from hvdtrain.training.result import Result, losses_and_speed, numbers
from hvdtrain.training.run_directory import RunDirectory, claim_run_directory
from hvdtrain.training.sanity import Sanity
from hvdtrain.training.schedule import factor, total_steps
from hvdtrain.training.stamps import add_stamps
from hvdtrain.training.step import Stepper
from hvdtrain.training.trainer import Trainer


def run_training(
    run: RunConfig,
    build: Callable[[], Any],
    comm: Comm,
    timeline: TimelinePlan,
    sinks: Sequence[Any] = (),
    voice: Voice | None = None,
) -> Result:
    """Train what `build` makes. Collective: yes. Errors and `sinks`: those of `hvdtrain.train`.

    Without a `voice` the failure card is written to the run folder only.
    """
    check_compression(run.config.parallel.compression)  # before anything costs time
    device = pick_device(run.config.parallel.device, comm)
    task = make_task(build, run.config, comm)
    directory, claim = _claim(run, comm)
    spans = Spans()
    try:
        with explained(directory, comm, spans, voice, run.config.observe.stall_timeout_s) as job:
            recorder = _recorder(run, task, directory, comm)
            try:
                add_sinks(recorder, run.config.observe, sinks, comm)
                add_tensorboard(recorder, run.config.observe, directory, device, comm)
                horovod = add_horovod_timeline(recorder, timeline, directory, comm)
                return _train(run, task, comm, device, directory, claim, recorder, spans, job, horovod)
            except BaseException as error:
                with suppress(Exception):  # a full disk, an error whose text cannot be made: it must not be replaced
                    recorder.event({"event": "failed", "error": type(error).__name__, "message": str(error)})
                raise
            finally:
                recorder.close()
    finally:
        if claim is not None:
            claim.release()


def _train(
    run: RunConfig,
    task: Task,
    comm: Comm,
    device: torch.device,
    directory: Path,
    claim: RunDirectory | None,
    recorder: Recorder,
    spans: Spans,
    job: Job,
    horovod: HorovodTimeline | None,
) -> Result:
    store = CheckpointStore(directory / CHECKPOINTS, recorder.warn, spans.touch) if claim is not None else None
    trainer = _trainer(run, task, comm, device, directory, store, recorder, spans)
    if comm.rank == 0:
        trainer.stepper.around = FirstPass(run.config, device, comm.size, recorder.event)
    state, engine = trainer.state, trainer.stepper.engine
    job.held = partial(held, run.config, device, trainer.stepper.model, engine)
    job.parts = engine.carried
    with ExitStack() as stack:
        stack.callback(engine.close)
        add_listeners(spans, run.config.observe, device, stack)
        _describe_start(run, task, comm, directory, recorder)
        resumed = on_rank_0(comm, partial(restore, run, state, store, claim, recorder), name="restored")
        broadcast_state(state, comm, spans.touch)
        done, observe = state.progress.step, run.config.observe
        model, folder = trainer.stepper.model, directory / TIMELINE
        start, stamps = add_stamps(recorder, observe, spans, folder, comm, model, device, done, trainer.stop)
        trainer.live = add_watchers(recorder, observe, spans, directory, comm, done, trainer.stop, horovod, start)
        if isinstance(engine, ExchangeEngine) and engine.undecided:
            trainer.saw_step = CompressionTrial(engine, comm, device, recorder.event, recorder.say).saw
        recorder.begin(trainer.stop)
        with Notices() as notices:
            reason = trainer.run(notices)
        if stamps is not None:
            stamps.finish()
    job.ending = True
    analysis = report(run.config.observe, directory, recorder, comm, state.progress.step)
    figures = on_rank_0(comm, partial(losses_and_speed, directory / journal.NAME), name="figures")
    return Result(
        run_dir=directory,
        reason=reason,
        step=state.progress.step,
        total_steps=trainer.horizon,
        resumed_at=resumed,
        unit=task.unit,
        model=trainer.stepper.model,
        analysis=analysis,
        **numbers(figures),
    )


def _trainer(
    run: RunConfig,
    task: Task,
    comm: Comm,
    device: torch.device,
    directory: Path,
    store: CheckpointStore | None,
    recorder: Recorder,
    spans: Spans,
) -> Trainer:
    """Put the parts together; the model is on its device then."""
    config, train = run.config, run.config.train
    model = task.model.to(device)
    if train.compile:
        count = compile_blocks(model)
        recorder.say(
            f"{count} block(s) of the model are compiled in the first evaluation and the first step, which take long"
        )
    samples = dataset_length(task.train_data)
    horizon = total_steps(train, samples)
    parallel = config.parallel
    times = add_gradient_times(recorder, config.observe, model, spans, directory, comm, device)
    engine = make_engine(_optimizer(task, run, recorder), model, comm, parallel.compression, spans, parallel.bucket_mib)
    if times is not None:
        times.engine = engine
    precision = Precision(config.precision, device)
    fresh = Progress(samples=samples, data_id=task.data_id)
    stepper = Stepper(task, model, engine, comm, precision, device, train.global_batch, train.clip, spans)
    stream = Stream(task.train_data, config.seed, train.global_batch, train.micro_batch, comm.rank, comm.size)
    return Trainer(
        config=config,
        comm=comm,
        state=TrainState(model, engine.optimizer, precision.scaler, fresh, engine),
        stepper=stepper,
        stream=stream,
        schedule=_schedule(task, run, horizon),
        base_lrs=[float(group["lr"]) for group in engine.optimizer.param_groups],
        horizon=horizon,
        stop=min(horizon, train.stop_at or horizon),
        store=store,
        observer=recorder,
        sanity=Sanity(stepper, stream, train.max_skipped, recorder.event, recorder.warn),
    )


def _claim(run: RunConfig, comm: Comm) -> tuple[Path, RunDirectory | None]:
    claims: list[RunDirectory] = []

    def claim() -> str:
        claims.append(claim_run_directory(run))
        return str(claims[0].path)

    return Path(on_rank_0(comm, claim, name="run_dir")), claims[0] if claims else None


def _recorder(run: RunConfig, task: Task, directory: Path, comm: Comm) -> Recorder:
    launched = rank_info(environ()).launcher != NO_LAUNCHER
    display = ProgressDisplay(task.unit, run.config.observe.line_every_s, live=not launched, quiet=comm.rank != 0)
    return Recorder(journal.Journal(directory / journal.NAME) if comm.rank == 0 else None, display)


def _optimizer(task: Task, run: RunConfig, recorder: Recorder) -> Optimizer:
    if task.optimizer is None:
        return make_optimizer(task.model, run.config.optimizer)
    recorder.say(f"the task brings its own optimizer ({type(task.optimizer).__name__}): --optimizer.* is not used")
    return task.optimizer


def _schedule(task: Task, run: RunConfig, horizon: int) -> Callable[[int], float]:
    if task.schedule is not None:
        return task.schedule
    return factor(run.config.optimizer, horizon) if task.optimizer is None else _constant


def _constant(step: int) -> float:
    return 1.0


def _describe_start(run: RunConfig, task: Task, comm: Comm, directory: Path, recorder: Recorder) -> None:
    train = run.config.train
    parameters = sum(p.numel() for p in task.model.parameters())
    facts = {"size": comm.size, "parameters": parameters, "unit": task.unit, "run_dir": str(directory)}
    if where := environ().get("NCCL_DEBUG_FILE"):
        facts["nccl_debug_file"] = str(Path(where).absolute())
    recorder.event({"event": "started", **facts, "config": dict(run.resolved)})
    recorder.say(
        f"{parameters / 1e6:.2f}M parameters, {dataset_length(task.train_data):,} samples, {comm.size} rank(s),"
        f" global batch {train.global_batch} in micro-batches of {train.micro_batch}"
    )
    count = len(micro_batches(0, train.global_batch, train.micro_batch))
    if count < comm.size:
        recorder.warn(
            f"{comm.size - count} of {comm.size} ranks idle: a global batch of {train.global_batch} has only {count}"
            f" micro-batch(es) of {train.micro_batch}; lower --train.micro_batch or raise --train.global_batch"
        )
    names = batch_statistics(task.model)
    if names:
        recorder.warn(
            f"the model has batch statistics ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}): its loss"
            " curve depends on --train.micro_batch, its running statistics on the number of ranks too;"
            " group norm depends on neither"
        )
