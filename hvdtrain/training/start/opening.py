"""The beginning of a round: where the run lives, who records it, what is said of it first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import on_rank_0
from hvdtrain.config.parse import RunConfig
from hvdtrain.data.loader import dataset_length
from hvdtrain.data.order import micro_batches
from hvdtrain.errors import RunDirectoryError
from hvdtrain.observe import journal
from hvdtrain.observe.failure.fault import first_of_device
from hvdtrain.observe.progress import Progress as ProgressDisplay
from hvdtrain.observe.recorder import Recorder
from hvdtrain.run_layout import RunLayout
from hvdtrain.runtime.environment import JOB, NO_LAUNCHER
from hvdtrain.runtime.exposure import exposed
from hvdtrain.training.diagnostics.health import batch_statistics
from hvdtrain.training.elastic.worker_state import NOTHING, WorkerState
from hvdtrain.training.start.resume_checks import check_end, check_files
from hvdtrain.training.start.run_directory import RUNS, RunDirectory, claim_run_directory

_LET_GO_S = 10.0
"""How long a claim of a rank that is gone may last."""


def claim_together(run: RunConfig, kept: WorkerState, comm: Comm) -> tuple[Path, RunDirectory | None]:
    """Where the run lives, and on rank 0 the claim to it. Collective: yes.

    A process that was in it before knows the directory: another rank 0 may have claimed it then. Where it is relative,
    each rank takes it from the folder in which it was started itself.
    """
    folder = kept.info.folder
    claims: list[RunDirectory] = []

    def claim() -> str:
        known = kept.directory
        wanted = run if known is None else _inside(run, known)
        end = time.monotonic() + (_LET_GO_S if known is not None else 0.0)
        while True:
            try:
                claimed = claim_run_directory(wanted, kept.info.variables.get(JOB, ""), folder)
            except RunDirectoryError:
                if time.monotonic() >= end:
                    raise
                time.sleep(0.05)
                continue
            if known is None:
                try:
                    check_files(claimed)
                    check_end(run, claimed, kept.horizon)
                except BaseException:
                    claimed.release()
                    raise
            claims.append(claimed)
            given = Path(wanted.config.run_dir or RUNS)
            return str(claimed.path if given.is_absolute() else claimed.path.relative_to(folder))

    kept.directory = Path(on_rank_0(comm, claim, name="run_dir"))
    return folder / kept.directory, claims[0] if claims else None


class ClaimWatch:
    """Ends the run on every rank soon after another job has taken its directory over.

    Args:
        claim: on rank 0; None elsewhere.
        comm: the ranks.
    """

    def __init__(self, claim: RunDirectory | None, comm: Comm) -> None:
        self._claim = claim
        self._comm = comm

    def notices(self) -> list[int]:
        """Whether it is lost, which the step that comes sums over ranks."""
        return [int(self._claim is not None and self._claim.lost)]

    def agreed(self, step: int, notices: Sequence[int]) -> None:
        """See whether it was. Collective: yes.

        Errors:
            RunDirectoryError: on every rank, if it was.
        """
        if notices[0]:
            on_rank_0(self._comm, self._check, name="claim")

    def _check(self) -> None:
        assert self._claim is not None
        self._claim.check()


def _inside(run: RunConfig, directory: Path) -> RunConfig:
    return replace(run, config=replace(run.config, run_dir=str(directory), resume="auto"))


def open_recorder(run: RunConfig, kept: WorkerState, comm: Comm, directory: Path) -> bool:
    """See that there is a recorder that fits the rank; whether it is a new one.

    The one of the round before goes on where this process is rank 0 as it was, or is not as it was not, and where what
    it has recorded still holds.
    """
    leads = comm.rank == 0
    recorder = kept.recorder
    if is_new := recorder is None or recorder.is_rank_0 != leads or kept.went_back():
        kept.close_recorder()
        launched = kept.info.launcher != NO_LAUNCHER
        display = ProgressDisplay(kept.task.unit, run.config.observe.line_every_s, live=not launched, quiet=not leads)
        recorder = Recorder(journal.Journal(RunLayout(directory).journal, display.say) if leads else None, display)
        kept.recorder = recorder
    return is_new


@contextmanager
def recording(kept: WorkerState, is_over: Callable[[BaseException], bool]) -> Iterator[Recorder]:
    """The recorder of a round; closed where the run has failed, and its watchers in any case."""
    recorder = kept.recorder
    assert recorder is not None
    try:
        yield recorder
    except BaseException as error:
        if is_over(error):
            with suppress(Exception):  # what watched Horovod finds it shut down
                recorder.close_watchers()
            raise
        first = first_of_device(error)
        with suppress(Exception):  # a full disk, an error whose text cannot be made: it must not be replaced
            if not isinstance(error, RunDirectoryError):  # the journal is another job's now
                recorder.event({"event": "failed", "error": type(first).__name__, "message": str(first)})
        with suppress(Exception):  # what watched a device that has failed fails too
            kept.close_recorder()
        raise
    recorder.close_watchers()


def describe_start(run: RunConfig, kept: WorkerState, comm: Comm, directory: Path, recorder: Recorder) -> None:
    """Tell the journal and the person who watches what begins."""
    task, train = kept.task, run.config.train
    parameters = sum(p.numel() for p in task.model.parameters())
    goes_on = kept.step != NOTHING  # among other ranks than before, in the same job
    facts = {"size": comm.size, "parameters": parameters, "unit": task.unit, "run_dir": str(directory)}
    if where := kept.info.variables.get("NCCL_DEBUG_FILE"):
        facts["nccl_debug_file"] = str(kept.info.folder.absolute() / where)
    recorder.event({"event": "started", "goes_on": goes_on, **facts, "config": dict(run.resolved)})
    if goes_on:
        return
    if task.optimizer is not None:
        recorder.say(f"the task brings its own optimizer ({type(task.optimizer).__name__}): --optimizer.* is not used")
        held = {id(parameter) for group in task.optimizer.param_groups for parameter in group["params"]}
        left_out = [name for name, p in task.model.named_parameters() if p.requires_grad and id(p) not in held]
        if left_out:
            recorder.warn(
                f"the task's optimizer does not hold {len(left_out)} of the parameters that want a gradient, which stay"
                f" as they are: {', '.join(left_out[:3])}{', ...' if len(left_out) > 3 else ''}"
            )
    if train.compile:
        recorder.say(
            f"{kept.compiled} block(s) of the model are compiled in the first evaluation and the first step, which take"
            " long"
        )
    recorder.say(
        f"{_count(parameters)} parameters, {dataset_length(task.train_data):,} samples, {comm.size} rank(s),"
        f" global batch {train.global_batch} in micro-batches of {train.micro_batch}"
    )
    if risk := exposed(kept.info.variables):
        recorder.warn(risk)
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


def _count(number: int) -> str:
    """``1,234`` as it is, ``1234567`` as ``1.23M``."""
    return f"{number / 1e6:.2f}M" if number >= 1_000_000 else f"{number:,}"
