"""Build the parts of a round of training; each part is complete when it is made."""

from __future__ import annotations

from dataclasses import replace

from hvdtrain.comm.base import Comm
from hvdtrain.compression.table import parse
from hvdtrain.data.loader import Stream
from hvdtrain.data.order import count_micro_batches
from hvdtrain.engine.base import Engine
from hvdtrain.engine.in_all_copies import InAllCopies
from hvdtrain.engine.make import make_engine
from hvdtrain.engine.periodic import PeriodicEngine, make_periodic
from hvdtrain.engine.schedule import with_stages
from hvdtrain.engine.sequence import divide_sequences
from hvdtrain.runtime.host import read_host
from hvdtrain.spans import Spans
from hvdtrain.state.buddies import Buddies
from hvdtrain.state.ledger import Ledger
from hvdtrain.training.diagnostics.drift import Drift, ParameterHashes
from hvdtrain.training.diagnostics.second_rank import make_second_rank
from hvdtrain.training.diagnostics.step_checks import StepChecks
from hvdtrain.training.elastic.roll_back import RollBack
from hvdtrain.training.elastic.worker_state import WorkerState
from hvdtrain.training.loop.balance import make_balance
from hvdtrain.training.loop.balance_loss import make_balance_loss
from hvdtrain.training.loop.buffers import Rollback
from hvdtrain.training.loop.feed import Feed
from hvdtrain.training.loop.router_loads import RouterLoads, routers_of
from hvdtrain.training.loop.saving import Saving
from hvdtrain.training.loop.shared_buffers import SharedBuffers
from hvdtrain.training.loop.step import Stepper
from hvdtrain.training.loop.step_part import Confirmation, StepPart
from hvdtrain.training.loop.step_sums import CombinedSums, StepSums
from hvdtrain.training.loop.sync_batch_norm import synchronize_batch_norm
from hvdtrain.training.loop.trainer import Trainer
from hvdtrain.training.loop.update import takes_scale
from hvdtrain.training.loop.worker_steps import WorkerSteps
from hvdtrain.training.records.gradient_times import GradientMarks, GradientTimes
from hvdtrain.training.records.job_facts import EnergyUse, FirstPass
from hvdtrain.training.round import Round
from hvdtrain.training.start.auto_compression import CompressionTrial
from hvdtrain.training.start.opening import ClaimWatch


def build_engine(current: Round) -> Engine:
    """Make the round's engine, with the exchange state of the last round. Collective: yes."""
    run, worker, comm, recorder, spans = current.run, current.worker, current.comm, current.recorder, current.spans
    variables, model = worker.info.variables, worker.state.model
    plan, train = worker.plan, run.config.train
    plan.dimensions.check(comm.size)
    plan.dimensions.check_passes(comm.size, count_micro_batches([(0, train.global_batch)], train.micro_batch))
    current.batch_norm = synchronize_batch_norm(model, comm, plan)
    # Workers that train apart exchange no gradients.
    is_timed = comm.rank == 0 and run.config.observe.timeline != "off" and plan.outer is None
    # Its hooks must run before those of the engine.
    ready = GradientMarks(model, spans, on_cuda=worker.device.type == "cuda") if is_timed else None
    try:
        engine = engine_of_worker(worker, comm, spans)
        worker.use_exchange(engine)
    except BaseException:
        if ready is not None:
            ready.close()
        raise
    if ready is not None and engine.uniform_passes:  # the model has other parameters now
        ready.close()
        # FSDP sums gradients by module: hooks of parameters do not run.
        ready = GradientMarks(model, spans, on_cuda=ready.on_cuda) if plan.engine != "fsdp" else None
    if ready is not None:
        path, host = current.layout.timeline.gradients, read_host(variables)
        recorder.add_watcher(GradientTimes(ready, engine, comm, spans, path, recorder.warn, host))
    return engine


def engine_of_worker(worker: WorkerState, comm: Comm, spans: Spans | None = None) -> Engine:
    """Make the engine of a worker's plan for its model and optimizer. Collective: yes.

    Where ranks divide sequences or layers, the worker's task has the loss of this rank's part from now on.
    """
    plan, state = worker.plan, worker.state
    by_torch = plan.torch_in_passes
    worker.task = divide_sequences(worker.task, comm, plan.dimensions, worker.device, spans, by_torch=by_torch)

    def make(ranks: Comm, compression: str) -> Engine:
        own, rest = replace(plan, compression=compression), (worker.info.variables, worker.device, worker.task.plan)
        return make_engine(state.optimizer, state.model, ranks, own, spans, *rest)

    if plan.outer is not None:
        return make_periodic(state.model, plan.outer, comm, make, plan.compression, elastic=plan.elastic)
    engine = make(comm, plan.compression)
    if plan.dimensions.pp > 1:
        assert engine.schedule.stage is not None
        worker.task = with_stages(worker.task, engine.schedule.stage)
    return engine


def build_trainer(current: Round, engine: Engine, energy: EnergyUse) -> Trainer:
    """Make the trainer of a round, after the state of the run is restored.

    `energy` measures the energy of the round.
    """
    worker, comm, recorder, spans = current.worker, current.comm, current.recorder, current.spans
    config, train, task, device = current.run.config, current.run.config.train, worker.task, worker.device
    dimensions, elastic = worker.plan.dimensions, current.rounds.elastic
    counts_flops = comm.rank == 0 and current.is_new and dimensions.pp == 1  # else each stage has others
    offload = config.memory.offload
    buffers = SharedBuffers(worker.state.model, comm, config.parallel.buffers, recorder.say)
    together = current.batch_norm is not None
    place, places, records = dimensions.samples(comm.rank, comm.size)
    routers, passes_count = routers_of(worker.state.model), dimensions.pass_counts(comm.rank)
    second = make_second_rank(current)
    hashes = ParameterHashes(train.check_every, worker.state.model, engine, None if comm.rank else recorder.event)
    step_parts: list[StepPart | None] = [
        FirstPass(config, device, comm.size, recorder.event, dimensions.same_samples) if counts_flops else None,
        current.batch_norm,
        make_balance_loss(worker.state.model, train.balance_loss, dimensions, compiled=train.compile),
        buffers,
        Rollback(worker.state.model, together=together, refuses=worker.plan.bits),
        # Changes biases after the step is applied, which there is nothing to roll back of.
        RouterLoads(routers, comm, train.router_bias, recorder.event, counts=passes_count) if routers else None,
        second,
        hashes if worker.plan.bits and train.check_every else None,
        Confirmation(comm, device) if elastic and device.type == "cuda" else None,
    ]
    stepper = Stepper(
        task=task,
        model=worker.state.model,
        engine=engine,
        comm=comm,
        precision=worker.precision,
        device=device,
        global_batch=train.global_batch,
        clip=train.clip,
        spans=spans,
        parts=[part for part in step_parts if part is not None],
        counts=dimensions.loss_counts(comm.rank, comm.size),
        sharing=dimensions.same_samples * dimensions.virtual_stages,
        by_device=device.type == "cuda" and offload == "none" and takes_scale(worker.state.optimizer),
    )
    uniform = engine.uniform_passes
    if offload != "none" and device.type == "cpu":
        recorder.warn(f"--memory.offload {offload} saves nothing on CPUs: their memory is the host's")
    if train.tf32 == "on" and device.type == "cpu":
        recorder.warn("--train.tf32 on changes nothing on CPUs, which have no TF32")
    batch = (train.global_batch, train.micro_batch)
    apart, workers = None, None
    if isinstance(engine, PeriodicEngine):
        engine.join_group()
        apart, workers = WorkerSteps(engine, stepper, worker.horizon), engine.links.workers
    stream = Stream(
        task.train_data,
        config.seed,
        *batch,
        place,
        places,
        uniform=uniform or together,
        in_turn=together or worker.plan.deals_in_turn,
        workers=workers,
    )
    ledger = Ledger(current.layout.ledger, recorder.warn)
    feed = Feed(current, stream, ledger, records=records)
    if apart is None:
        stepper.ahead = feed.ahead
    host = worker.info.variables.get("HOROVOD_HOSTNAME", worker.info.host)  # as the launcher names it
    roll_back = RollBack(
        policy=config.elastic.roll_back,
        commits=worker.commits,
        comm=comm,
        store=current.store,
        event=recorder.event,
        warn=recorder.warn,
        # A lost rank takes state with it: pieces, or residuals that its compression has not delivered.
        needs_commits=lambda: elastic and (engine.in_pieces or parse(engine.compression).kind.feedback),
        buddies=Buddies(comm, host, current.rounds.is_leaving, spans.touch) if elastic and engine.in_pieces else None,
    )
    drift = Drift(worker.state, comm, train.check_every, buffers.share, recorder.warn)
    trial = None
    if isinstance(engine.sums, InAllCopies) and engine.sums.undecided:
        facts = read_host(worker.info.variables)
        trial = CompressionTrial(engine.sums, comm, device, facts, batch, recorder.event, recorder.say)
    balance = make_balance(current, feed)
    parts: list[StepSums] = [drift, ClaimWatch(current.claim, comm), worker.callbacks, energy]
    parts += [balance] if balance is not None else []
    return Trainer(
        current=current,
        stepper=stepper,
        feed=feed,
        saving=Saving(current, stepper, ledger, roll_back, buffers),
        step_checks=StepChecks(current, stepper, feed),
        roll_back=roll_back,
        on_step=trial.add_step if trial is not None else lambda record: None,
        sums=CombinedSums(*parts),
        second=second,
        balance=balance,
        apart=apart,
    )
