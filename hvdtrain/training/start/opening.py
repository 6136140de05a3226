"""The beginning of a round: claim the run folder, record failures, describe the run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import on_rank_0
from hvdtrain.compression.table import parse
from hvdtrain.config.parse import RunConfig
from hvdtrain.data.loader import training_samples
from hvdtrain.data.order import even_options
from hvdtrain.errors import ETC, RunDirectoryError, listed
from hvdtrain.observe.failure.fault import first_of_device
from hvdtrain.observe.journal import FORMAT
from hvdtrain.observe.sinks import Recorder
from hvdtrain.plan.description import more_bytes
from hvdtrain.runtime.environment import JOB
from hvdtrain.runtime.host import describe_map, problems
from hvdtrain.runtime.interfaces import describe_exposure
from hvdtrain.runtime.tuning import DYNAMIC, TIMELINE
from hvdtrain.state.divided import whole_shape
from hvdtrain.training.elastic.worker_state import WorkerState
from hvdtrain.training.loop.sync_batch_norm import Synchronized
from hvdtrain.training.records.job_facts import EnergyUse, gather_facts
from hvdtrain.training.round import Round
from hvdtrain.training.start.make_task import spectral_norms
from hvdtrain.training.start.resume_checks import check_end, check_files
from hvdtrain.training.start.run_directory import RUNS, RunDirectory, claim_run_directory
from hvdtrain.training.start.store_target import claim_store, fetch_run

_RELEASE_S = 60.0
"""How long the claim of an earlier rank 0 may last: it may be dying, or leaving and waiting for a slow disk."""


def claim_together(run: RunConfig, worker: WorkerState, comm: Comm) -> tuple[Path, RunDirectory | None]:
    """Return the run folder, and on rank 0 the claim to it. Collective: yes.

    A process of an earlier round knows the folder; another rank 0 may have claimed it then. A relative folder is
    relative to the folder in which each rank was started.
    """
    folder = worker.info.folder
    claims: list[RunDirectory] = []

    def claim() -> str:
        earlier = worker.directory
        wanted = run
        if earlier is not None:
            wanted = replace(run, config=replace(run.config, run_dir=str(earlier), resume="auto"))
        end = time.monotonic() + (_RELEASE_S if earlier is not None else 0.0)
        while True:
            try:
                with ExitStack() as stack:
                    claimed = claim_run_directory(wanted, worker.info.variables.get(JOB, ""), folder)
                    stack.callback(claimed.release)
                    claim_store(run, claimed)
                    if earlier is None:
                        check_files(claimed)
                        fetch_run(run, claimed)
                        check_end(run, claimed, worker.horizon)
                    stack.pop_all()
            except RunDirectoryError:
                if time.monotonic() >= end:
                    raise
                time.sleep(0.05)
                continue
            claims.append(claimed)
            given = Path(wanted.config.run_dir or RUNS)
            return str(claimed.path if given.is_absolute() else claimed.path.relative_to(folder))

    worker.directory = Path(on_rank_0(comm, claim, name="run_dir"))
    return folder / worker.directory, claims[0] if claims else None


class ClaimWatch:
    """Ends the run on every rank soon after another job has claimed its folder. Only rank 0 has the claim."""

    def __init__(self, claim: RunDirectory | None, comm: Comm) -> None:
        self._claim = claim
        self._comm = comm

    def values(self) -> list[int]:
        """Return 1 if the claim is lost."""
        return [int(self._claim is not None and self._claim.lost)]

    def on_sums(self, step: int, sums: Sequence[int]) -> None:
        """Check the claim. Collective: yes. Errors: RunDirectoryError: on every rank, if it is lost."""
        if sums[0]:
            on_rank_0(self._comm, self._claim.check if self._claim is not None else lambda: None, name="claim")


@contextmanager
def recording(worker: WorkerState, is_over: Callable[[BaseException], bool]) -> Iterator[Recorder]:
    """Yield the recorder of a round. Close its watchers at the end, and itself if the run fails."""
    recorder = worker.recorder
    assert recorder is not None
    try:
        yield recorder
    except BaseException as error:
        if is_over(error):
            with suppress(Exception):  # watchers of Horovod find it shut down
                recorder.close_watchers()
            raise
        first = first_of_device(error)
        with suppress(Exception):  # such as a full disk: the run's own error must not be replaced
            if not isinstance(error, RunDirectoryError):  # the journal belongs to another job now
                recorder.event({"event": "failed", "error": type(first).__name__, "message": str(first)})
        with suppress(Exception):  # watchers of a failed device fail too
            worker.close_recorder()
        raise
    recorder.close_watchers()


def describe_start(current: Round) -> EnergyUse:
    """Record and show what begins; return what measures its energy. Collective: yes."""
    comm, recorder = current.comm, current.recorder
    job, counters = gather_facts(comm, current.worker.device, binding=current.worker.binding)
    kinds = [kind for kind, reason in job["energy"].items() if not reason]
    energy = EnergyUse(comm, counters, kinds, recorder.event)
    recorder.add_watcher(energy)
    _describe(current, job)
    return energy


def _describe(current: Round, job: Mapping[str, Any]) -> None:
    worker, recorder, size = current.worker, current.recorder, current.comm.size
    task, train = worker.task, current.run.config.train
    parameters = sum(math.prod(whole_shape(p)) for p in task.model.parameters())
    trained = sum(math.prod(whole_shape(p)) for p in task.model.parameters() if p.requires_grad)
    started = {
        "event": "started",
        "format": FORMAT,
        "goes_on": worker.resumes_in_job,
        "size": size,
        "parameters": parameters,
        "trained": trained,
        "unit": task.unit,
        "run_dir": str(current.layout.folder),
        **job,
    }
    for name in ("NCCL_DEBUG_FILE", TIMELINE):  # files that the user had recorded
        if (where := worker.info.variables.get(name)) and where != DYNAMIC:
            started[name.lower()] = str(worker.info.folder.absolute() / where)
    recorder.event({**started, "config": dict(current.run.resolved)})
    if worker.resumes_in_job:
        return
    for warning in worker.warnings:
        recorder.warn(warning)
    if worker.plan.dimensions:
        for line in worker.plan.dimensions.table(size):
            recorder.say(line)
    if task.optimizer is not None:
        recorder.say(f"the task has its own optimizer ({type(task.optimizer).__name__}): --optimizer.* is ignored")
        optimized = worker.state.optimized()
        left_out = [n for n, p in task.model.named_parameters() if p.requires_grad and p.numel() and n not in optimized]
        if left_out:
            recorder.warn(
                f"the task's optimizer lacks {len(left_out)} of the parameters that require a gradient, so they do not"
                f" change: {listed(left_out, rest=ETC)}"
            )
    if train.compile:
        recorder.say(
            f"{worker.compiled} block(s) of the model are compiled during the first evaluation and step, which are slow"
        )
    count = f"{_count(parameters)} parameters"
    if trained < parameters:
        count += f" ({_count(trained)} trained, {100 * trained / parameters:.2g}%)"
    samples = training_samples(task.train_data)
    recorder.say(
        f"{count}, {f'{samples:,} samples' if samples else 'an iterable data set'}, {size} rank(s),"
        f" global batch {train.global_batch} in micro-batches of {train.micro_batch}"
    )
    for note in (worker.note, current.claim.remark if current.claim is not None else ""):
        if note:
            recorder.say(note)
    for line in describe_map(job["binding"]):
        recorder.say(line)
    for problem in problems(job["binding"]):
        recorder.warn(problem)
    if risk := describe_exposure(worker.info.variables):
        recorder.warn(risk)
    _, places, _ = worker.plan.dimensions.samples(0, size)
    unequal = unequal_shares(train.global_batch, train.micro_batch, places)
    if unequal and worker.plan.balance == "equal" and worker.plan.outer is None:
        (recorder.warn if "idle" in unequal else recorder.say)(unequal)
    shapes = [whole_shape(p) for p in task.model.parameters() if p.requires_grad]
    name, apart = worker.plan.compression, bool(worker.plan.dimensions) or worker.plan.outer is not None
    if name not in ("none", "auto") and not apart and (most := parse(name).most_ranks(shapes, size)) < size:
        fewer = f" ({most} at most would send less)" if most > 1 else ""
        recorder.warn(
            f"--parallel.compression {name} sends more than none on {size} ranks{fewer}, as each gets what all others"
            " keep; use --parallel.compression powersgd:4, or fp16"
        )
    if worker.plan.bits:
        recorder.say(f"all sums are taken in one order{more_bytes(worker.plan, size)}")
    if current.batch_norm is not None:
        recorder.say(
            f"nn.SyncBatchNorm has the statistics of {size} micro-batches of {train.micro_batch}: the loss curve"
            " depends on their product"
        )
    kind = nn.modules.batchnorm._BatchNorm
    named = task.model.named_modules()
    if names := [name for name, m in named if isinstance(m, kind) and not isinstance(m, Synchronized)]:
        recorder.warn(
            f"the model has batch statistics ({listed(names, rest=ETC)}): its loss"
            " curve depends on --train.micro_batch, and its running statistics also on the number of ranks;"
            " group norm depends on neither"
        )
    if spectral := spectral_norms(task.model):
        recorder.warn(
            f"the model has spectral norm ({listed(spectral, rest=ETC)}), which each"
            " forward pass changes: its loss curve depends on --train.micro_batch and the number of ranks"
        )


def unequal_shares(global_batch: int, micro_batch: int, ranks: int) -> str:
    """Return what it costs if ranks do not get equally many micro-batches, and what divides them; "" if they do."""
    passes = -(-global_batch // micro_batch)
    least, more = divmod(passes, ranks)
    if not more:
        return ""
    most = least + 1
    if least:
        found = f"{more} of {ranks} ranks have {most} micro-batches of {micro_batch} a step, the others {least}"
    else:
        found = f"{ranks - more} of {ranks} ranks are idle, as a step has {passes} micro-batch(es) of {micro_batch}"
    options = even_options(global_batch, micro_batch, ranks)
    return f"{found}: about {1 - passes / (most * ranks):.0%} of the ranks' time is waiting; use {options}"


def _count(parameters: int) -> str:
    return f"{parameters / 1e6:.2f}M" if parameters >= 1_000_000 else f"{parameters:,}"
