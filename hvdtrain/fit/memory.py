"""The memory of a rank in a step of training: the trainer's engine runs two steps on tensors without memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hvdtrain.comm.solo import ImaginedComm, Traffic, imagined_ranks
from hvdtrain.compression import base
from hvdtrain.compression.table import parse
from hvdtrain.config.parse import RunConfig
from hvdtrain.config.schema import LoaderConfig
from hvdtrain.data.loader import Stream, train_batches
from hvdtrain.data.order import count_micro_batches
from hvdtrain.engine.base import Engine
from hvdtrain.errors import ConfigError, HvdtrainError
from hvdtrain.fit.imagined_tensors import FusedAttention, ImaginedDdp, ImaginedTensors, LiveBytes
from hvdtrain.plan.plan import plan_of
from hvdtrain.plan.refusals import resolve
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.state.placeholder import parameters_without_memory, refuse_other_placeholders
from hvdtrain.task.base import Task
from hvdtrain.training.elastic.worker_state import WorkerState, make_worker_state
from hvdtrain.training.loop.forward import checked_loss
from hvdtrain.training.start.build import engine_of_worker
from hvdtrain.training.start.make_task import make_task

_PASSES = 2
"""The second pass of a step finds the gradients of the first one; later ones need no more."""
_MANY = 1 << 40
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Memory:
    """Bytes of the tensors of a rank."""

    model: int  # parameters and buffers of the model, on the device
    optimizer: int  # its state, on the device
    peak: int  # the largest sum of all in a step, on the device: the rest is activations, gradients and their exchange
    host: int = 0  # state and parameters of an optimizer in the memory of the host
    sent: int = 0  # bytes that a rank sends in a step; see `Traffic`
    waited_for: int = 0  # those of activations, in which forward and backward wait
    bubble: float = 0.0  # share of a step in which stages of a pipeline wait at least


def predict_memory(run: RunConfig, build: Callable[[], Any], ranks: int) -> Memory:
    """Return the memory of a rank of a job of `ranks`, which has the most micro-batches.

    Of the stages of a pipeline, it is that of the one that needs the most, with the most bytes in collectives of any.

    `build` makes the task of `run`. Its data must be there; its parameters need no memory, unless it reads them.

    Errors:
        ConfigError: an option that cannot be predicted, or steps that depend on computed values.
        Those of a job's start.
    """
    dimensions = plan_of(run.config).dimensions
    if dimensions.pp > 1:
        dimensions.check(ranks)
        train = run.config.train
        passes = count_micro_batches([(0, train.global_batch)], train.micro_batch)
        dimensions.check_passes(ranks, passes)
        stages = [_predict(run, build, ranks, rank) for rank in dimensions.pipeline(0, ranks)]
        largest, bubble = max(stages, key=lambda each: each.peak), dimensions.bubble(ranks, passes)
        sent, waited = max(each.sent for each in stages), max(each.waited_for for each in stages)
        return replace(largest, sent=sent, waited_for=waited, bubble=bubble)
    return _predict(run, build, ranks)


def _predict(run: RunConfig, build: Callable[[], Any], ranks: int, rank: int = 0) -> Memory:
    parallel, comm = run.config.parallel, ImaginedComm(ranks, rank=rank)
    if parallel.engine == "ddp":
        resolve(run.config)  # refuses what DDP does not support
        comm = ImaginedDdp(ranks, parse(parallel.compression).kind.name)
        parallel = replace(parallel, engine="horovod", compression="none")
        run = replace(run, config=replace(run.config, parallel=parallel))
    plan = resolve(run.config)
    if plan.outer is not None:
        raise ConfigError(
            f"hvdtrain fit does not predict --parallel.sync {run.config.parallel.sync}",
            expected="ranks that exchange in every step",
            next_step="predict --parallel.sync every_step; workers need in addition, for each that a rank serves, the"
            " parameters and the state of the optimizer, and once the parameters and the outer momentum",
        )
    run = replace(run, config=replace(run.config, train=replace(run.config.train, compile=False)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        dimensions = plan.dimensions
        waits = dimensions.divides_model  # its gradients are exchanged by `comm`
        imagined, task = ImaginedTensors(comm.traffic, waits_for_torch=waits), _make_task(run, build)
        worker = make_worker_state(run, plan, task, _CPU, RankInfo("fit"))
        imagined.imagine(worker.state.model, worker.state.optimizer)
        device = run.config.parallel.device
        on_gpu = device in ("cuda", "shared") or (device == "auto" and torch.version.cuda is not None)
        here = imagined_ranks(ranks, rank) if dimensions.pp > 1 else nullcontext()
        with _explained(), _as_on_gpu() if on_gpu else nullcontext(), here:
            return count_bytes(run, worker, imagined, comm)


def _make_task(run: RunConfig, build: Callable[[], Any]) -> Task:
    """Make the task, if possible without memory for its parameters."""
    try:
        with parameters_without_memory(draw=False):
            task = make_task(build, run.config)
        refuse_other_placeholders(task.model)
        return task
    except HvdtrainError:
        raise
    except Exception:
        return make_task(build, run.config)


@contextmanager
def _as_on_gpu() -> Iterator[None]:
    """Compute as on GPUs: attention without scores, and compressed shards of all ranks at once."""
    before = base.processes_at_once
    base.processes_at_once = lambda device: True
    try:
        with FusedAttention():
            yield
    finally:
        base.processes_at_once = before


def count_bytes(run: RunConfig, worker: WorkerState, live: LiveBytes, comm: ImaginedComm) -> Memory:
    """Run two steps of a rank in a job that does not run, and return what `live` has counted."""
    live.add([*worker.state.model.parameters(), *worker.state.model.buffers()])
    with live:
        engine = engine_of_worker(worker, comm)
        if engine.uniform_passes:  # before it was divided, the model was in the memory of the host
            live.peak = live.now
        try:
            return _count_steps(run, worker, engine, live, comm)
        finally:
            engine.close()


def _count_steps(run: RunConfig, worker: WorkerState, engine: Engine, live: LiveBytes, comm: ImaginedComm) -> Memory:
    train = run.config.train
    data = worker.task.train_data
    plan = worker.plan
    place, places, _ = plan.dimensions.samples(comm.rank, comm.size)
    stream = Stream(data, run.config.seed, train.global_batch, train.micro_batch, place, places)
    # Micro-batches with which memory is largest; FSDP gathers some parameters in vain where passes take turns.
    is_more = plan.dimensions.virtual_stages > 1 or plan.engine == "fsdp"
    under_way = plan.dimensions.pp * (2 if is_more else 1)
    passes = min(max(_PASSES, under_way), len(stream.step(0)))
    loaded = train_batches(stream, 0, 1, LoaderConfig(), worker.task.collate, on_cuda=False)
    batches = [batch.batch for batch, _ in zip(loaded, range(passes), strict=False)]
    parameters = [p for p in worker.state.model.parameters() if p.requires_grad]
    averages = [p.detach().clone() for p in parameters] if train.ema is not None else []  # as the callback EMA
    one = _step(engine, worker, batches[:1], live, comm.traffic)  # makes the optimizer's state
    if isinstance(comm, ImaginedDdp):  # only ours keeps all gradients until the end of the first backward
        live.peak = live.now
    some = _step(engine, worker, batches, live, comm.traffic)
    # What a pass sends is the difference.
    more = (len(stream.step(0)) - 1) / max(1, passes - 1)
    sent, waited = (round(a + more * (b - a)) for a, b in zip(one, some, strict=True))
    model = _bytes([*worker.state.model.parameters(), *worker.state.model.buffers(), *averages])
    slots = [slot for state in engine.optimizer.state.values() for slot in state.values()]
    optimizer = _bytes([slot for slot in slots if isinstance(slot, Tensor)])
    if not plan.offload:
        return Memory(model, optimizer, live.peak, 0, sent, waited)
    host = optimizer + _bytes([own.parameter for own in (engine.owned() or {}).values() if own.parameter is not None])
    on_host = model if engine.uniform_passes else 0  # the rows of FSDP are the optimizer's
    return Memory(model - on_host, 0, live.peak - host, host, sent, waited)


def _step(
    engine: Engine, worker: WorkerState, batches: list[Any], live: LiveBytes, traffic: Traffic
) -> tuple[int, int]:
    """Do what `Stepper` does, but without its numbers; return the bytes that are sent, and that are waited for."""
    traffic.sent = traffic.waited_for = 0
    engine.begin(len(batches))

    def forward(batch: Any) -> Callable[[], None]:
        with worker.precision.autocast():
            loss, _ = engine.forward(partial(checked_loss, worker.task, worker.state.model, batch))
        return partial(engine.backward, loss)

    with worker.precision.weights(engine.complete):
        engine.accumulate(partial(forward, batch) for batch in batches)
    live.assumed = _MANY  # rows of a gradient that are not zero: all of them are exchanged
    gradients = engine.finish()
    live.assumed = None
    engine.norm(gradients)
    if gradients:
        torch._foreach_mul_(gradients, 1.0)
    del gradients
    live.assumed = 1.0  # optimizers read their step counts, and the exchange whether all values are finite
    engine.step()
    engine.commit(applied=True)
    live.assumed = None
    engine.complete()
    return traffic.sent, traffic.waited_for


def _bytes(tensors: list[Tensor]) -> int:
    """Return the bytes of the storages of tensors, each once."""
    local = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    return sum({id(each.untyped_storage()): each.untyped_storage().nbytes() for each in local}.values())


@contextmanager
def _explained() -> Iterator[None]:
    """Turn torch's errors for missing values into one that says what cannot be predicted."""
    try:
        yield
    except RuntimeError as error:
        raise ConfigError(
            "the memory of this model cannot be predicted: its steps depend on values that are computed",
            found=f"{type(error).__name__}: {error}".partition("\n")[0],
            next_step="measure it: train some steps with --train.stop_at",
        ) from error
