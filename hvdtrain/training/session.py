"""A run from its options to its result, round by round: every part is made here and handed to the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import on_rank_0
from hvdtrain.comm.rounds import CHANGED, FAILED, STARTED, Rounds
from hvdtrain.compression.table import parse
from hvdtrain.config.parse import RunConfig
from hvdtrain.data.loader import Stream
from hvdtrain.engine.base import Engine
from hvdtrain.engine.exchange import ExchangeEngine
from hvdtrain.engine.make import check_compression, make_engine
from hvdtrain.observe.failure.failure_output import FailureOutput
from hvdtrain.observe.failure.reporter import JobFacts
from hvdtrain.observe.horovod_timeline import HorovodTimeline
from hvdtrain.observe.recorder import Recorder
from hvdtrain.run_layout import RunLayout
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.runtime.host import read_host
from hvdtrain.runtime.timeline import TimelinePlan
from hvdtrain.spans import Spans
from hvdtrain.state.checkpoint_store import CheckpointStore
from hvdtrain.state.ledger import Ledger
from hvdtrain.training.diagnostics.drift import Drift
from hvdtrain.training.diagnostics.failures import explained
from hvdtrain.training.diagnostics.memory_holders import held
from hvdtrain.training.diagnostics.step_checks import StepChecks
from hvdtrain.training.elastic.roll_back import RollBack
from hvdtrain.training.elastic.worker_state import WorkerState, keep
from hvdtrain.training.loop.combined_sums import CombinedSums
from hvdtrain.training.loop.feed import Feed
from hvdtrain.training.loop.saving import Saving
from hvdtrain.training.loop.shared_buffers import SharedBuffers
from hvdtrain.training.loop.step import Stepper
from hvdtrain.training.loop.trainer import Trainer
from hvdtrain.training.records.compute import FirstPass
from hvdtrain.training.records.gradient_times import add_gradient_times
from hvdtrain.training.records.observers import (
    add_horovod_timeline,
    add_listeners,
    add_monitor,
    add_sinks,
    add_tensorboard,
    add_watchers,
)
from hvdtrain.training.records.run_report import report
from hvdtrain.training.records.stamp_collection import add_stamps
from hvdtrain.training.result import Result, losses_and_speed, numbers
from hvdtrain.training.start.auto_compression import CompressionTrial
from hvdtrain.training.start.device import check_own, pick_device
from hvdtrain.training.start.make_task import check_same_data, make_task, refusing_exit
from hvdtrain.training.start.opening import ClaimWatch, claim_together, describe_start, open_recorder, recording
from hvdtrain.training.start.restore import take_over
from hvdtrain.training.start.resume_checks import train_on
from hvdtrain.training.start.run_directory import RunDirectory
from hvdtrain.training.start.schedule import stop_step


def run_training(
    run: RunConfig,
    build: Callable[[], Any],
    rounds: Rounds,
    timeline: TimelinePlan,
    info: RankInfo,
    sinks: Sequence[Any] = (),
    output: FailureOutput | None = None,
) -> Result:
    """Train what `build` makes. Collective: yes. Errors and `sinks`: those of `hvdtrain.train`.

    `info` is who this process was at its start. Without a `output` the failure card is written to the run folder only.
    """
    check_compression(run.config.parallel.compression)  # before anything costs time
    device = pick_device(run.config.parallel.device, rounds.local_rank, rounds.local_size)
    kept = keep(run, make_task(build, run.config, info.variables), device, info)
    why, text = STARTED, ""
    with kept.notices if rounds.elastic else nullcontext():
        while True:
            comm = kept.enter(rounds, why, text)
            try:
                result = _Round(run, kept, rounds, comm, timeline, sinks, output).train()
            except BaseException as error:
                if not rounds.is_over(error):
                    raise
                kept.round_is_over(settled=False)
                why, text = FAILED, str(error)
                continue
            if result is not None:
                kept.close_recorder()
                rounds.report_leaving(result.reason)
                return result
            kept.round_is_over(settled=True)
            why, text = CHANGED, ""


@dataclass
class _Round:
    """From the joining of some ranks to the end of training, or until they have changed.

    Attributes:
        run: the options.
        kept: of this process.
        rounds: say when the round is over.
        comm: the ranks.
        timeline: of Horovod, as planned before it was initialised.
        sinks: of a program.
        output: of the failure card.
    """

    run: RunConfig
    kept: WorkerState
    rounds: Rounds
    comm: Comm
    timeline: TimelinePlan
    sinks: Sequence[Any]
    output: FailureOutput | None

    def train(self) -> Result | None:
        """Train; None where the ranks are about to change. Collective: yes."""
        run, kept, comm = self.run, self.kept, self.comm
        check_own(kept.device, comm)
        check_same_data(kept.task, comm)
        directory, claim = claim_together(run, kept, comm)
        self.rounds.report_progress(spans := Spans())
        ranks = {name: getattr(comm, name) for name in ("rank", "size", "local_rank", "local_size")}
        info = replace(kept.info, **ranks)
        try:
            stall_s = run.config.observe.stall_timeout_s
            with explained(directory, comm, spans, self.output, stall_s, self.rounds, info) as reporter:
                kept.given_up = reporter.report_no_new_round
                is_new = open_recorder(run, kept, comm, directory)
                with recording(kept, self.rounds.is_over) as recorder:
                    if is_new:
                        add_sinks(recorder, run.config.observe, self.sinks, comm, kept.info.folder)
                        add_tensorboard(recorder, run.config.observe, directory, kept.device, comm)
                    add_monitor(recorder, kept.device, comm)
                    horovod = add_horovod_timeline(recorder, self.timeline, directory, comm, told=not is_new)
                    with refusing_exit():
                        return self._train(directory, claim, recorder, spans, reporter.job, horovod, is_new=is_new)
        finally:
            if claim is not None:
                claim.release()

    def _train(
        self,
        directory: Path,
        claim: RunDirectory | None,
        recorder: Recorder,
        spans: Spans,
        job: JobFacts,
        horovod: HorovodTimeline | None,
        *,
        is_new: bool,
    ) -> Result | None:
        run, kept, comm, state = self.run, self.kept, self.comm, self.kept.state
        store = None
        if claim is not None:
            store = CheckpointStore(RunLayout(directory).checkpoints, recorder.warn, spans.touch, claim.check)
        trainer = self._trainer(directory, store, recorder, spans)
        engine, observe = trainer.stepper.engine, run.config.observe
        if comm.rank == 0 and is_new:
            trainer.stepper.around = FirstPass(run.config, kept.device, comm.size, recorder.event)
        job.memory_holders = partial(held, run.config, kept.device, trainer.stepper.model, engine)
        job.collective_parameters = engine.carried
        with ExitStack() as stack:
            stack.callback(engine.close)
            stack.callback(self._remember, trainer)
            stack.callback(trainer.feed.ledger.close)
            add_listeners(spans, observe, kept.device, stack)
            describe_start(run, kept, comm, directory, recorder)
            resumed = take_over(run, kept, comm, store, claim, recorder, spans.touch)
            done, model, folder = state.progress.step, trainer.stepper.model, RunLayout(directory).timeline.folder
            start, stamps = add_stamps(
                recorder, observe, spans, folder, comm, model, kept.device, done, trainer.stop, kept.links
            )
            live = add_watchers(recorder, observe, spans, directory, comm, done, trainer.stop, horovod, start)
            drift = Drift(state, comm, run.config.train.check_every, trainer.stepper.buffers, recorder.warn)
            trainer.live = CombinedSums(live, drift, ClaimWatch(claim, comm))
            if isinstance(engine, ExchangeEngine) and engine.undecided:
                batch, host = (
                    (run.config.train.global_batch, run.config.train.micro_batch),
                    read_host(kept.info.variables),
                )
                trial = CompressionTrial(engine, comm, kept.device, host, batch, recorder.event, recorder.say)
                trainer.saw_step = trial.add_step
            recorder.begin(trainer.stop)
            with kept.notices:
                reason = trainer.run(kept.notices)
            if reason == CHANGED:
                return None
            if stamps is not None:
                stamps.finish()
        job.ending = True
        analysis = report(observe, directory, recorder, comm, state.progress.step)
        return Result(
            run_dir=directory,
            reason=reason,
            step=state.progress.step,
            total_steps=kept.horizon,
            train_on=train_on(run.config, kept),
            resumed_at=resumed,
            unit=kept.task.unit,
            model=state.model,
            analysis=analysis,
            **numbers(on_rank_0(comm, partial(losses_and_speed, RunLayout(directory).journal), name="figures")),
        )

    def _loses(self, engine: Engine) -> Callable[[], bool]:
        """Whether a rank that is gone takes something of the state with it: what its compression still owes."""
        return lambda: self.rounds.elastic and parse(engine.compression).kind.feedback

    def _remember(self, trainer: Trainer) -> None:
        self.kept.last = trainer.last or self.kept.last

    def _trainer(self, directory: Path, store: CheckpointStore | None, recorder: Recorder, spans: Spans) -> Trainer:
        """Put the parts together."""
        run, kept, comm = self.run, self.kept, self.comm
        config, train, parallel = run.config, run.config.train, run.config.parallel
        model = kept.state.model
        carried = kept.carried()
        variables = kept.info.variables
        host = read_host(variables)
        times = add_gradient_times(recorder, config.observe, model, spans, directory, comm, kept.device, host)
        optimizer = kept.state.optimizer
        engine = make_engine(optimizer, model, comm, parallel.compression, spans, parallel.bucket_mib, variables)
        if carried is not None:
            engine.load_state_dict(*carried)
        if times is not None:
            times.engine = engine
        kept.state.exchange = engine
        buffers = SharedBuffers(model, comm, parallel.buffers, recorder.say)
        stepper = Stepper(
            kept.task, model, engine, comm, kept.precision, kept.device, train.global_batch, train.clip, spans, buffers
        )
        stream = Stream(kept.task.train_data, config.seed, train.global_batch, train.micro_batch, comm.rank, comm.size)
        ledger, on_cuda = Ledger(RunLayout(directory).ledger, recorder.warn), kept.device.type == "cuda"
        feed = Feed(config, comm, stream, ledger, spans, kept.task.collate, on_cuda)
        roll_back = RollBack(
            config.elastic.roll_back, kept.commits, comm, store, recorder.event, recorder.warn, self._loses(engine)
        )
        saving = Saving(
            config, comm, kept.state, stepper, store, ledger, roll_back, recorder.event, recorder.warn, kept.seen
        )
        return Trainer(
            config=config,
            comm=comm,
            rounds=self.rounds,
            state=kept.state,
            stepper=stepper,
            feed=feed,
            schedule=kept.schedule,
            base_lrs=kept.base_lrs,
            horizon=kept.horizon,
            stop=stop_step(train, kept.horizon),
            saving=saving,
            observer=recorder,
            roll_back=roll_back,
            sanity=StepChecks(stepper, stream, train.max_skipped, recorder.event, recorder.warn),
        )
