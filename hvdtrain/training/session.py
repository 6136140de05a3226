"""The story of a run, from its options to its result, round by round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hvdtrain.comm.base import Comm
from hvdtrain.comm.rounds import CHANGED, FAILED, STARTED, Rounds
from hvdtrain.config.parse import RunConfig
from hvdtrain.engine.base import Engine
from hvdtrain.engine.make import check_compression
from hvdtrain.observe.failure.failure_output import FailureOutput
from hvdtrain.observe.failure.reporter import Reporter
from hvdtrain.observe.recorder import Recorder
from hvdtrain.run_layout import RunLayout
from hvdtrain.runtime.driver_client import JobFailed
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.runtime.timeline import TimelinePlan
from hvdtrain.spans import Spans
from hvdtrain.state.checkpoint_store import CheckpointStore
from hvdtrain.training.diagnostics.failure_report import report_failures
from hvdtrain.training.diagnostics.memory_holders import memory_holders
from hvdtrain.training.elastic.worker_state import WorkerState, make_worker_state
from hvdtrain.training.records.observers import add_job_observers, add_listeners, add_step_observers
from hvdtrain.training.records.run_report import explain_run
from hvdtrain.training.result import Result, read_result
from hvdtrain.training.start.build import build_engine, build_trainer
from hvdtrain.training.start.device import check_device_is_own, pick_device
from hvdtrain.training.start.make_task import check_same_data, make_task, refuse_exit
from hvdtrain.training.start.opening import claim_together, describe_start, recording
from hvdtrain.training.start.restore import resume_state
from hvdtrain.training.start.run_directory import RunDirectory


def run_training(
    run: RunConfig,
    build: Callable[[], Any],
    rounds: Rounds,
    timeline: TimelinePlan,
    info: RankInfo,
    sinks: Sequence[Any] = (),
    output: FailureOutput | None = None,
) -> Result:
    """Train the task that `build` makes. Collective: yes. Errors and `sinks`: those of `hvdtrain.train`.

    `info` describes this process at its start. Without an `output`, the failure card goes to the run folder only.
    """
    check_compression(run.config.parallel.compression)  # before anything costs time
    device = pick_device(run.config.parallel.device, rounds.local_rank, rounds.local_size)
    worker = make_worker_state(run, make_task(build, run.config, info.variables), device, info)
    why, text = STARTED, ""
    failed: _Round | None = None
    with worker.signals if rounds.elastic else nullcontext():
        while True:
            try:
                comm = rounds.enter(why, text, worker.step)
            except JobFailed:
                if failed is not None and failed.reporter is not None:
                    failed.reporter.report_no_new_round()
                raise
            failed = None  # its engine holds buckets
            current = _Round(run, worker, rounds, comm, timeline, sinks, output)
            try:
                result = current.train()
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


@dataclass
class _Round:
    """One round: from the join of its ranks to the end of training, or until the ranks change.

    Attributes:
        run: the options.
        worker: state of this process.
        rounds: says when the round is over.
        comm: the ranks.
        timeline: plan for Horovod's Timeline, made before Horovod was initialised.
        sinks: of the calling program.
        output: shows the failure card.
        reporter: reports failures, from the moment the run folder is known.
        engine: exchange and optimizer, once they are made.
        is_ending: whether this rank needs no other rank any more, so that each may end.
    """

    run: RunConfig
    worker: WorkerState
    rounds: Rounds
    comm: Comm
    timeline: TimelinePlan
    sinks: Sequence[Any]
    output: FailureOutput | None
    reporter: Reporter | None = field(default=None, init=False)
    engine: Engine | None = field(default=None, init=False)
    is_ending: bool = field(default=False, init=False)

    def train(self) -> Result | None:
        """Train; return None if the ranks are about to change. Collective: yes."""
        run, worker, comm = self.run, self.worker, self.comm
        warning = check_device_is_own(worker.device, comm, may_share=run.config.parallel.device == "shared")
        check_same_data(worker.task, comm)
        directory, claim = claim_together(run, worker, comm)
        self.rounds.report_progress(spans := Spans())
        ranks = {name: getattr(comm, name) for name in ("rank", "size", "local_rank", "local_size")}
        info = replace(worker.info, **ranks)
        stall_s = run.config.observe.stall_timeout_s
        try:
            with report_failures(
                directory, comm, spans, self.output, stall_s, self.rounds, info, self
            ) as self.reporter:
                is_new = worker.open_recorder(run, comm, RunLayout(directory))
                with recording(worker, self.rounds.is_over) as recorder:
                    if warning and comm.rank == 0:
                        recorder.warn(warning)
                    return self._train(directory, claim, recorder, spans, is_new=is_new)
        finally:
            if claim is not None:
                claim.release()

    def _train(
        self, directory: Path, claim: RunDirectory | None, recorder: Recorder, spans: Spans, *, is_new: bool
    ) -> Result | None:
        run, worker, comm, layout = self.run, self.worker, self.comm, RunLayout(directory)
        observe = run.config.observe
        horovod = add_job_observers(recorder, run, self.timeline, self.sinks, layout, worker, comm, is_new=is_new)
        with refuse_exit():
            with ExitStack() as stack:
                store = None
                if claim is not None:
                    store = CheckpointStore(layout.checkpoints, recorder.warn, spans.touch, claim.check)
                # The exchange first: the state of a checkpoint includes it.
                self.engine = engine = build_engine(run, worker, comm, layout, recorder, spans)
                stack.callback(engine.close)
                add_listeners(spans, observe, worker.device, stack)
                describe_start(run, worker, comm, directory, recorder)
                resumed_at = resume_state(run, worker, comm, store, claim, recorder, spans.touch)
                # Now the step is known: the observers of the steps to come, and the trainer of these steps.
                live, stamps = add_step_observers(recorder, run, spans, layout, worker, comm, horovod)
                trainer = build_trainer(
                    run, worker, self.rounds, comm, engine, layout, store, claim, recorder, spans, live, is_new=is_new
                )
                stack.callback(lambda: worker.remember_last(trainer.last_record))
                stack.callback(trainer.feed.ledger.close)
                recorder.begin(trainer.stop)
                with worker.signals:
                    reason = trainer.run(worker.signals)
                if reason == CHANGED:
                    return None
                if stamps is not None:
                    stamps.finish()
            self.is_ending = True
            analysis = explain_run(observe, directory, recorder, comm, worker.state.progress.step)
            return read_result(run, worker, comm, layout, reason, resumed_at, analysis)

    def memory_holders(self) -> dict[str, Any]:
        """Return what holds memory in this process, for the failure card; nothing before the engine is made."""
        if self.engine is None:
            return {}
        return memory_holders(self.run.config, self.worker.device, self.worker.state.model, self.engine)

    def parameters_by_collective(self) -> dict[str, list[str]]:
        """Return the parameters of each collective, for the failure card; nothing before the engine is made."""
        return {} if self.engine is None else self.engine.parameters_by_collective()
