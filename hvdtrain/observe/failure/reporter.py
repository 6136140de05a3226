"""Report a failure: write this rank's statement, and the card if this rank claims it."""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from hvdtrain.files import write_text
from hvdtrain.observe.failure import card
from hvdtrain.observe.failure.mailbox import Mailbox
from hvdtrain.observe.failure.process_states import DEAD, STOPPED, UNKNOWN, UNREACHABLE, memory, oom_kills
from hvdtrain.observe.failure.statement import CURRENT, FAILED, STALLED, Statement, StatementMaker
from hvdtrain.observe.failure.verdict import STALL, SilentRank, find_cause, pending_collectives
from hvdtrain.observe.output import FailureOutput, encodable, to_stderr
from hvdtrain.run_layout import RunLayout
from hvdtrain.runtime.clock import steady_s

_STATEMENTS_WAIT_S = 2.0
_DEAD_RANK_WAIT_S = 0.4
"""mpirun kills the other ranks one second after it has sent them SIGTERM."""
_CARD_WAIT_S = 6.0
_POLL_S = 0.05


@dataclass
class JobFacts:
    """Facts about the run for the card."""

    run_dir: Path  # as the user gave it
    absolute_dir: Path  # the same, absolute
    resume: str
    checkpoint: Callable[[], str | None]  # finds the newest checkpoint
    memory_holders: Callable[[BaseException], dict[str, Any]] = lambda error: {}  # of the error, if memory ran out
    collective_parameters: Callable[[], Mapping[str, Sequence[str]]] = dict  # by collective, those with gradients in it
    is_ending: Callable[[], bool] = lambda: False  # whether a rank may end, as no other rank waits for it


@dataclass
class Reporter:
    """Reports a failure once for all ranks.

    The first rank that needs a card claims it, whether it caused the failure or not. The other ranks write their
    statements and wait for the card, because a launcher ends every rank soon after the first one has ended. If the
    card does not appear, the next rank writes it.
    """

    mailbox: Mailbox
    statements: StatementMaker
    job: JobFacts
    output: FailureOutput  # shows the card of a raised error; the watchdog writes to stderr
    lock: threading.Lock = field(default_factory=threading.Lock)
    error_raised: bool = False  # whether an error was raised; the watchdog reports nothing from then on
    _oom_kills_before: int = field(default_factory=oom_kills)

    def report_error(self, error: BaseException) -> None:
        """Report a raised error, and mark the output as reported. Called in the training thread.

        If this is one of several ranks and does not share the run folder, the caller must report the error.
        """
        with self.lock:  # a watchdog that ends this process never releases it
            self.error_raised = True
            if isinstance(error, KeyboardInterrupt):
                self.mailbox.mark_finished()
                return
            statement = self.statements.minimal(FAILED, error)
            with suppress(Exception):  # a failed report must not replace the error
                statement = self.statements.failure(error)
            if statement.fault is not None and statement.fault.memory:
                with suppress(Exception):
                    statement = replace(statement, memory_holders=self.job.memory_holders(error))
            if self.mailbox.folder is None and len(self.mailbox.ranks) > 1:
                return
            self.mailbox.post_statement(statement)
            self.report(statement, self._statements_wait_s(), self.output.show)
            self.output.reported = True

    def post_state(self, kind: str = CURRENT) -> Statement:
        """Write a statement about where this rank is. Called outside the training thread."""
        try:
            statement = self.statements.current(kind)
        except Exception:  # such as no memory for the stacks: a stalled rank must be reported all the same
            statement = self.statements.minimal(kind)
        self.mailbox.post_statement(statement)
        return statement

    def report(self, own: Statement, wait_s: float, show: Callable[[str], None]) -> None:
        """Write and show the card, or wait until another rank has done so."""
        number = 0
        while not self.mailbox.claim_card(number):
            if self._another_reports(number):
                return
            number += 1
        try:
            text = self._write(own, wait_s, number)
        except Exception:  # a bug here must not hide the failure, nor let the job hang
            why = own.fault.traceback if own.fault else f"{own.kind}: {own.stacks}"
            text = f"{why}\nhvdtrain: the failure card could not be written:\n{traceback.format_exc()}"
        show(text)
        self.mailbox.mark_reported()

    def _statements_wait_s(self) -> float:
        """Return how long to wait for statements. With more ranks, each watchdog polls less often."""
        return max(_STATEMENTS_WAIT_S, 2 * self.mailbox.poll_interval_s(0.0))

    def _another_reports(self, number: int) -> bool:
        """Wait for the card of the rank that claimed attempt `number`; False if that rank stopped working on it."""
        poll_s = self.mailbox.poll_interval_s(_POLL_S)
        patience_s = max(_CARD_WAIT_S, 3 * poll_s)
        claimed_ns, since = self.mailbox.claim_time_ns(number), time.monotonic()
        while not self.mailbox.is_reported():
            if (renewed_ns := self.mailbox.claim_time_ns(number)) != claimed_ns:
                claimed_ns, since = renewed_ns, time.monotonic()
            elif time.monotonic() - since > patience_s:
                return False
            time.sleep(poll_s)
        return True

    def report_missing_rank(self) -> None:
        """Report a dead rank of this host, within the second before the launcher kills this one. For the watchdog."""
        self.report(self.post_state(), _DEAD_RANK_WAIT_S, to_stderr)

    def report_no_new_round(self) -> None:
        """Report a dead rank for which there is no new round. Called in the training thread."""
        if self.mailbox.folder is None and len(self.mailbox.ranks) > 1:
            return
        own = replace(self.statements.minimal(CURRENT), memory=memory())
        self.mailbox.post_statement(own)
        self.report(own, _DEAD_RANK_WAIT_S, self.output.show)

    def report_stall(self) -> None:
        """Report that there is no progress. For the watchdog."""
        self.report(self.post_state(STALLED), self._statements_wait_s(), to_stderr)

    def _write(self, own: Statement, wait_s: float, number: int) -> str:
        layout = RunLayout(self.job.absolute_dir)
        statements, silent = self._gather(own, wait_s, number)
        kills = oom_kills() - self._oom_kills_before
        verdict = find_cause(statements, silent, oom_kills=kills, shared=self.mailbox.folder is not None)
        waited = []
        if verdict.kind == STALL:
            waited = pending_collectives(statements, silent, self.job.collective_parameters())
        failure = card.Failure(verdict, statements, silent, waited)
        facts = card.make_card(
            failure,
            time=steady_s(),
            size=len(self.mailbox.ranks),
            run_dir=str(self.job.run_dir),
            checkpoint=self.job.checkpoint(),
            resume=self.job.resume if layout.config.exists() else None,
        )
        text = encodable(card.render(failure, facts, str(RunLayout(self.job.run_dir).failure_json)))
        with suppress(OSError):  # a full disk may be the failure
            write_text(layout.failure_text, text)
            write_text(layout.failure_json, json.dumps(facts, indent=1))
        return text

    def _gather(self, own: Statement, wait_s: float, number: int) -> tuple[list[Statement], list[SilentRank]]:
        """Wait up to `wait_s` for statements. Return them, and what is known of the ranks without one."""
        deadline = time.monotonic() + wait_s
        known: dict[str, Statement] = {}
        while True:
            self.mailbox.renew_claim(number)
            found = {s.process.rank: s for s in self.mailbox.statements(known)}
            found.setdefault(own.process.rank, own)
            states = self.mailbox.states()
            halted = {rank for rank, state in states.items() if state in (*DEAD, STOPPED)}
            awaited = self.mailbox.reachable - found.keys() - halted
            if not awaited or time.monotonic() >= deadline:
                break
            time.sleep(_POLL_S)
        beats, now = self.mailbox.heartbeats(), steady_s()
        silent = []
        for process in self.mailbox.ranks:
            rank = process.rank
            if rank not in found and not self.mailbox.has_finished(rank):
                last = beats.get(rank, {})
                last = {**last, "ago_s": max(0.0, round(now - last["time"], 1))} if "time" in last else {}
                state = states.get(rank, UNKNOWN) if rank in self.mailbox.reachable | halted else UNREACHABLE
                silent.append(SilentRank(process, state, self.mailbox.crash_text(rank), last))
        return [found[rank] for rank in sorted(found)], silent


def archive_old_card(run_dir: Path) -> None:
    """Move the card of an earlier failure to RUN/failures/, named by its time.

    So ``failure.json`` in a run folder always belongs to the run's last start.
    """
    layout = RunLayout(run_dir)
    for path in (layout.failure_text, layout.failure_json):
        with suppress(OSError):
            when = time.strftime("%Y%m%d-%H%M%S", time.gmtime(path.stat().st_mtime))
            layout.old_failures.mkdir(exist_ok=True)
            path.replace(layout.old_failures / f"{when}{path.suffix}")
