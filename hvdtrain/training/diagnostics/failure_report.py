"""Reports of a failed run: the watchdog while it trains, the failure card at its end, and what holds memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.errors import UnreadableCheckpointError
from hvdtrain.observe.failure.mailbox import crash_notes, open_mailbox
from hvdtrain.observe.failure.reporter import JobFacts, Reporter, archive_old_card
from hvdtrain.observe.failure.statement import StatementMaker, this_process
from hvdtrain.observe.output import FailureOutput
from hvdtrain.observe.shell_commands import relative_to_start, resume_command, resume_program
from hvdtrain.observe.watchdog import Watchdog
from hvdtrain.run_layout import RunLayout
from hvdtrain.state.checkpoint_store import CheckpointStore
from hvdtrain.training.loop.step_sums import handlers_as_before
from hvdtrain.training.records.memory import (
    failing_module,
    largest_parameters,
    memory_advice,
    memory_by_kind,
    unused_memory,
)
from hvdtrain.training.round import Round


@contextmanager
def report_failures(current: Round, output: FailureOutput | None) -> Iterator[Reporter]:
    """Run a watchdog inside the context, and write the failure card if it fails. Collective: yes, at its begin.

    Errors pass through. The watchdog ends this process if nothing makes progress, or if another rank dies. An error
    that ends the round is not reported yet: see `Reporter.report_no_new_round`.

    `output` shows the card. Without it a program trains, and the card names the program's own command to resume.
    """
    comm, rounds, directory = current.comm, current.rounds, current.layout.folder
    config = current.run.config
    ranks = {name: getattr(comm, name) for name in ("rank", "size", "local_rank", "local_size")}
    info = replace(current.worker.info, **ranks)
    mailbox = open_mailbox(directory, comm, this_process(comm.rank, info.host))
    place = mailbox.folder.parent.parent if mailbox.folder is not None else directory
    if comm.rank == 0:
        archive_old_card(place)
    given = relative_to_start(directory, info)
    resume = resume_command(directory, info) if output is not None else resume_program(directory, info, sys.orig_argv)
    job = JobFacts(
        given,
        place,
        resume,
        lambda: _newest_checkpoint(place, given),
        partial(_memory_of, current),
        lambda: {} if current.engine is None else current.engine.sums.parameters_by_collective(),
        lambda: current.is_ending,
    )
    statements = StatementMaker(mailbox.process, current.spans, comm.in_flight)
    reporter = Reporter(mailbox, statements, job, output or FailureOutput())
    with handlers_as_before():
        try:
            with crash_notes(mailbox), Watchdog(reporter, config.observe.stall_timeout_s, driven=rounds.elastic):
                yield reporter
        except BaseException as error:
            if rounds.is_over(error):
                raise
            reporter.report_error(error)
            if hasattr(error, "add_note") and RunLayout(place).failure_text.exists():  # from Python 3.11 on
                error.add_note(f"more: {current.layout.failure_text}")
            raise
    mailbox.mark_finished()
    if comm.rank == 0:
        mailbox.remove()


def _newest_checkpoint(place: Path, directory: Path) -> str | None:
    try:
        saves = CheckpointStore(RunLayout(place).checkpoints, lambda text: None).list()
    except UnreadableCheckpointError as error:
        return f"unknown: {error.what}"
    return str(RunLayout(directory).checkpoints / saves[-1].path.name) if saves else None


def _memory_of(current: Round, error: BaseException) -> dict[str, Any]:
    """Return what holds memory, what asked for more, and which further options would need less."""
    if current.engine is None:
        return {}
    config, worker = current.run.config, current.worker  # not those of the beginning: the micro-batch may be found
    held = memory_by_kind(worker.device, worker.state.model, current.engine)
    elastic = current.rounds.elastic
    advice = memory_advice(config, worker.state.model, worker.device, current.comm.size, elastic=elastic)
    with suppress(Exception):  # of a failed device; the rest is known
        held["unused"] = unused_memory(worker.device)
    held |= {"module": failing_module(error, worker.state.model), "largest": largest_parameters(worker.state.model)}
    return {**held, "micro_batch": config.train.micro_batch, "precision": config.precision, "advice": advice}
