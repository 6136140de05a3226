"""A run that explains its failure: the watchdog beside it, the card after it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hvdtrain.comm.base import Comm
from hvdtrain.comm.rounds import Rounds
from hvdtrain.errors import UnreadableCheckpointError
from hvdtrain.observe.failure.failure_output import FailureOutput
from hvdtrain.observe.failure.mailbox import crash_notes, open_mailbox
from hvdtrain.observe.failure.reporter import JobFacts, Reporter, archive_old_card
from hvdtrain.observe.failure.statement import StatementMaker, this_process
from hvdtrain.observe.shell_commands import relative_to_start, resume_command, resume_program
from hvdtrain.observe.watchdog import Watchdog
from hvdtrain.run_layout import RunLayout
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.spans import Spans
from hvdtrain.state.checkpoint_store import CheckpointStore
from hvdtrain.training.loop.notices import handlers_as_before


@contextmanager
def explained(
    directory: Path,
    comm: Comm,
    spans: Spans,
    output: FailureOutput | None,
    stall_timeout_s: float,
    rounds: Rounds,
    info: RankInfo,
) -> Iterator[Reporter]:
    """Watch what is done inside; write the failure card if it fails. Collective: yes, at the start.

    Gives who tells, with the facts that a card tells of the run, to be completed once there is a model. Errors pass
    through; where nothing makes progress or a rank is gone, this process is ended. Without a `output` it is a program
    that trains, and the program is what goes on. Of an error that ends the round nothing is told as yet: see
    `Reporter.report_no_new_round`. `info`: who this process is in the round.
    """
    mailbox = open_mailbox(directory, comm, this_process(comm.rank, info.host))
    place = mailbox.folder.parent.parent if mailbox.folder is not None else directory
    if comm.rank == 0:
        archive_old_card(place)
    here = relative_to_start(directory, info)
    again = resume_command(directory, info) if output is not None else resume_program(directory, info, sys.orig_argv)
    job = JobFacts(here, place, again, lambda: _newest(place, here))
    reporter = Reporter(mailbox, StatementMaker(mailbox.process, spans, comm.in_flight), job, output or FailureOutput())
    with handlers_as_before():
        try:
            with crash_notes(mailbox), Watchdog(reporter, stall_timeout_s, driven=rounds.elastic):
                yield reporter
        except BaseException as error:
            if rounds.is_over(error):
                raise
            reporter.report_error(error)
            if hasattr(error, "add_note") and RunLayout(place).failure_text.exists():  # from Python 3.11 on
                error.add_note(f"more: {RunLayout(directory).failure_text}")
            raise
    mailbox.mark_finished()
    if comm.rank == 0:
        mailbox.remove()


def _newest(place: Path, directory: Path) -> str | None:
    try:
        found = CheckpointStore(RunLayout(place).checkpoints, _say_nothing).list()
    except UnreadableCheckpointError as error:
        return f"not known: {error.what}"
    return str(RunLayout(directory).checkpoints / found[-1].path.name) if found else None


def _say_nothing(text: str) -> None:
    pass
