"""The story of a run, from its options to its result, round by round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

from hvdtrain.comm.rounds import CHANGED, FAILED, STARTED, Rounds
from hvdtrain.config.parse import RunConfig
from hvdtrain.data.loader import dataset_length
from hvdtrain.observe.output import FailureOutput
from hvdtrain.plan.refusals import resolve
from hvdtrain.run_layout import RunLayout
from hvdtrain.runtime.driver_client import JobFailed
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.runtime.tuning import TimelinePlan
from hvdtrain.spans import Spans
from hvdtrain.state.checkpoint_store import CheckpointStore, Measure
from hvdtrain.state.store_copier import StoreCopier
from hvdtrain.training.callbacks.base import Callback
from hvdtrain.training.callbacks.group import make_callbacks
from hvdtrain.training.diagnostics.failure_report import report_failures
from hvdtrain.training.elastic.worker_state import make_worker_state
from hvdtrain.training.loop.forward import forward_dtype
from hvdtrain.training.loop.router_loads import RouterLoads
from hvdtrain.training.loop.sync_batch_norm import restore_batch_norm
from hvdtrain.training.records.observers import add_job_observers, add_listeners, add_stamps, add_traces
from hvdtrain.training.records.run_report import explain_run
from hvdtrain.training.result import Result, read_result
from hvdtrain.training.round import Round
from hvdtrain.training.start.build import build_engine, build_trainer
from hvdtrain.training.start.device import (
    bind_rank,
    check_device_is_own,
    fix_threads,
    pick_device,
    set_tf32,
    training_stream,
    use_deterministic_kernels,
)
from hvdtrain.training.start.make_task import (
    check_keeps_bits,
    check_same_data,
    make_task,
    make_task_by_rank,
    refuse_exit,
)
from hvdtrain.training.start.opening import claim_together, describe_start, recording
from hvdtrain.training.start.restore import resume_state
from hvdtrain.training.start.store_target import fetch_checkpoint


def run_training(
    run: RunConfig,
    build: Callable[[], Any],
    rounds: Rounds,
    timeline: TimelinePlan,
    info: RankInfo,
    sinks: Sequence[Any] = (),
    output: FailureOutput | None = None,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Train the task that `build` makes. Collective: yes. Errors, `sinks`, `callbacks`: those of `hvdtrain.train`.

    `timeline` was made before Horovod was initialised. `info` describes this process at its start. Without an
    `output`, the failure card goes to the run folder only.
    """
    parallel = run.config.parallel
    # before anything costs time
    plan = resolve(run.config, elastic=rounds.elastic)
    if run.config.train.deterministic or plan.bits:
        use_deterministic_kernels(info.variables)
    # In an elastic job a rank that joins chooses alone.
    first = None if rounds.elastic else rounds.enter(STARTED)
    device = pick_device(parallel.device, rounds.local_rank, rounds.local_size, first)
    binding = bind_rank(parallel.bind, device, rounds, first, info.variables)
    set_tf32(run.config.train.tf32, device)
    make = partial(make_task, build, run.config)
    # An engine that places the model is for jobs of one round only.
    if plan.places_model:
        reads_later = plan.dimensions.cp == 1  # it checks the model on rank 0, which needs values
        task, warning = make_task_by_rank(make, rounds.enter(STARTED), may_read_later=reads_later)
    else:
        task, warning = make(), ""
    note = task.prepare(device, forward_dtype(run.config.precision)) if task.prepare is not None else ""
    if plan.bits:
        check_keeps_bits(task.model)
    worker = make_worker_state(run, plan, task, device, info)
    worker.note, worker.binding = note, binding
    heldout = 0 if task.heldout_data is None else dataset_length(task.heldout_data, least=0)
    worker.callbacks = make_callbacks(run.config, info, callbacks, evaluates=heldout > 0)
    worker.state.extras = worker.callbacks.by_name
    worker.warnings += [warning] if warning else []
    why, text = STARTED, ""
    failed: Round | None = None
    with worker.signals if rounds.elastic else nullcontext():
        while True:
            try:
                comm = rounds.enter(why, text, worker.step)
            except JobFailed:
                if failed is not None and failed.reporter is not None:
                    failed.reporter.report_no_new_round()
                raise
            failed = None  # its engine holds buckets
            current = Round(run, worker, rounds, comm)
            try:
                result = _train_round(current, timeline, sinks, output)
            except BaseException as error:
                if not rounds.is_over(error):
                    raise
                worker.end_round(synchronized=False)
                why, text, failed = FAILED, str(error), current
                continue
            if result is not None:
                worker.close_recorder()
                rounds.report_leaving(result.reason)
                return result
            worker.end_round(synchronized=True)
            why, text, failed = CHANGED, "", None


def _train_round(
    current: Round, timeline: TimelinePlan, sinks: Sequence[Any], output: FailureOutput | None
) -> Result | None:
    """Train; return None if the ranks are about to change. Collective: yes."""
    run, worker, comm = current.run, current.worker, current.comm
    warning = check_device_is_own(worker.device, comm, may_share=run.config.parallel.device == "shared")
    check_same_data(worker.task, comm)
    directory, current.claim = claim_together(run, worker, comm)
    current.layout, current.spans = RunLayout(directory), Spans()
    current.rounds.report_progress(current.spans)
    try:
        with report_failures(current, output) as current.reporter:
            current.is_new = worker.open_recorder(run, comm, current.layout)
            with recording(worker, current.rounds.is_over) as current.recorder, training_stream(worker.device):
                if warning and comm.rank == 0:
                    current.recorder.warn(warning)
                return _train_recorded(current, timeline, sinks)
    finally:
        current.engine = None  # frees its buckets before those of the next round are made
        restore_batch_norm(worker.state.model)
        worker.callbacks.end_round()
        if current.claim is not None:
            current.claim.release()


def _train_recorded(current: Round, timeline: TimelinePlan, sinks: Sequence[Any]) -> Result | None:
    run, worker, comm, recorder, spans = current.run, current.worker, current.comm, current.recorder, current.spans
    add_job_observers(current, timeline, sinks)
    with refuse_exit():
        with ExitStack() as stack:
            if current.claim is not None:
                folder, warn, touch = current.layout.checkpoints, recorder.warn, spans.touch
                best, check = Measure.parse(run.config.checkpoint.best), current.claim.check
                current.store = CheckpointStore(folder, warn, touch, check, worker.task.files, best)
                if (stored := current.claim.stored) is not None:
                    keep = run.config.checkpoint.keep
                    current.copier = StoreCopier(stored, current.layout, keep, recorder.event, warn)
                    current.store.is_needed = current.copier.needs
                    current.store.fetch = partial(fetch_checkpoint, stored, current.claim)
                    stack.callback(current.copier.close)
            # The exchange first: the state of a checkpoint includes it.
            current.engine = build_engine(current)
            stack.callback(current.engine.close)
            add_listeners(spans, run.config.observe, worker.device, stack)
            energy = describe_start(current)
            resumed_at = resume_state(current)
            if worker.plan.bits:
                fix_threads(worker.state.progress, worker.info.variables, comm)
            if current.copier is not None and current.store is not None:
                current.copier.begin(next((saved.path for saved in reversed(current.store.list())), None))
            # Now the step is known: the observers of the steps to come, and the trainer of these steps.
            start, stamps = add_stamps(current)
            add_traces(current, start)
            trainer = build_trainer(current, current.engine, energy)
            stack.callback(trainer.feed.ledger.close)
            for part in trainer.stepper.parts:
                stack.callback(part.close)
                if stamps is not None and isinstance(part, RouterLoads):
                    stamps.expert_share = part.own_share
            recorder.begin(current.stop)
            with worker.signals:
                reason = trainer.run(worker.signals)
            energy.finish()
            if reason == CHANGED:
                return None
            if stamps is not None:
                stamps.finish()
        current.is_ending = True
        return read_result(current, reason, resumed_at, explain_run(current))
