"""Reports of a failed run: the watchdog while it trains, the failure card at its end."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

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
from hvdtrain.training.loop.step_sums import handlers_as_before


class RunFacts(Protocol):
    """Facts about a run that a failure card shows, read when it fails.

    Attributes:
        is_ending: whether this rank needs no other rank any more.
    """

    is_ending: bool

    def memory_holders(self) -> dict[str, Any]:
        """Return what holds memory."""
        ...

    def parameters_by_collective(self) -> Mapping[str, Sequence[str]]:
        """Return the parameters of each collective."""
        ...


@contextmanager
def report_failures(
    directory: Path,
    comm: Comm,
    spans: Spans,
    output: FailureOutput | None,
    stall_timeout_s: float,
    rounds: Rounds,
    info: RankInfo,
    facts: RunFacts,
) -> Iterator[Reporter]:
    """Run a watchdog inside the context, and write the failure card if it fails. Collective: yes, at its begin.

    Errors pass through. The watchdog ends this process if nothing makes progress, or if another rank dies. An error
    that ends the round is not reported yet: see `Reporter.report_no_new_round`.

    Args:
        directory: run folder.
        comm: the ranks.
        spans: show the progress of the training thread.
        output: shows the card. Without it a program trains, and the card names the program's own command to resume.
        stall_timeout_s: seconds without progress before the watchdog ends the process.
        rounds: says which errors end the round.
        info: of this process in the round.
        facts: about the run.
    """
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
        facts.memory_holders,
        facts.parameters_by_collective,
        lambda: facts.is_ending,
    )
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


def _newest_checkpoint(place: Path, directory: Path) -> str | None:
    try:
        saves = CheckpointStore(RunLayout(place).checkpoints, lambda text: None).list()
    except UnreadableCheckpointError as error:
        return f"unknown: {error.what}"
    return str(RunLayout(directory).checkpoints / saves[-1].path.name) if saves else None
