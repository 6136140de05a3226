"""One rank's part in telling of a failure: its statement, and the card if it is the one to write it."""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hvdtrain.durable import write_text
from hvdtrain.observe.encodable import encodable
from hvdtrain.observe.failure import card, process
from hvdtrain.observe.failure import verdict as blame
from hvdtrain.observe.failure.failure_output import FailureOutput, to_stderr
from hvdtrain.observe.failure.mailbox import Mailbox
from hvdtrain.observe.failure.statement import FAILED, HERE, STALLED, Statement, Witness
from hvdtrain.observe.failure.verdict import Silent
from hvdtrain.run_layout import RunLayout
from hvdtrain.runtime.clock import steady_s

_OTHERS_COME_S = 2.0
_SILENT_COME_S = 0.4
"""mpirun kills those that are left one second after it has told them to end."""
_CARD_COMES_S = 6.0
_LOOK_EVERY_S = 0.05


@dataclass
class Job:
    """What a card says of the run.

    Attributes:
        run_dir: as the run was given it.
        place: the same, absolute.
        resume: the command that goes on.
        checkpoint: finds the newest checkpoint.
        held: what holds memory; asked where that ran out.
        parts: parameters by the collective that carries their gradients.
        ending: no rank is waited for any more: each may end when it wants to.
    """

    run_dir: Path
    place: Path
    resume: str
    checkpoint: Callable[[], str | None]
    held: Callable[[], dict[str, Any]] = dict
    parts: Callable[[], Mapping[str, Sequence[str]]] = dict
    ending: bool = False


@dataclass
class Reporter:
    """Says what happened, once for all ranks.

    Whichever rank first needs a card claims it, whether it is to blame or not: the others leave their statements and
    wait until it is written, because a launcher ends every rank soon after the first one has ended. A card that does
    not come is written by the next.

    Attributes:
        post: between the ranks.
        witness: of this rank.
        job: the run.
        voice: for errors that are raised; what the watchdog says goes to stderr.
        over: whether an error was raised, so that the watchdog has nothing to say any more.
    """

    post: Mailbox
    witness: Witness
    job: Job
    voice: FailureOutput
    lock: threading.Lock = field(default_factory=threading.Lock)
    over: bool = False
    _oom_kills_before: int = field(default_factory=process.oom_kills)

    def failed(self, error: BaseException) -> None:
        """In the training thread: tell of an error, and note in the voice that it is told.

        Not where this rank is one of several and does not reach the others: then it is for the caller to say it.
        """
        with self.lock:  # held for good by a watchdog that is ending this process
            self.over = True
            if isinstance(error, KeyboardInterrupt):
                self.post.leave()
                return
            held: dict[str, Any] = {}
            statement = self.witness.barely(FAILED, error)
            with suppress(Exception):  # what is told of an error must not replace it
                statement = self.witness.failed(error)
            if statement.fault is not None and statement.fault.memory:
                with suppress(Exception):
                    held = self.job.held()
                with suppress(Exception):
                    statement = self.witness.failed(error, held)
            if self.post.folder is None and len(self.post.ranks) > 1:
                return
            self.post.say(statement)
            self.tell(statement, self._others_come_s(), self.voice.show)
            self.voice.told = True

    def say(self, kind: str = HERE) -> Statement:
        """In another thread: leave word where this rank is."""
        try:
            statement = self.witness.here(kind)
        except Exception:  # no memory for the stacks, say: a rank that stands still must be told of still
            statement = self.witness.barely(kind)
        self.post.say(statement)
        return statement

    def tell(self, own: Statement, patience_s: float, show: Callable[[str], None]) -> None:
        """Write and show the card, or wait until another rank has."""
        number = 0
        while not self.post.claim(number):
            if self._another_tells(number):
                return
            number += 1
        try:
            text = self._write(own, patience_s, number)
        except Exception:  # a fault of this code must not leave a failure untold, nor a job that hangs
            why = own.fault.traceback if own.fault else f"{own.kind}: {own.stacks}"
            text = f"{why}\nhvdtrain: the failure card could not be written:\n{traceback.format_exc()}"
        show(text)
        self.post.tell()

    def _others_come_s(self) -> float:
        """How long to wait for the others' statements: their watchdogs look the seldomer, the more they are."""
        return max(_OTHERS_COME_S, 2 * self.post.every_s(0.0))

    def _another_tells(self, number: int) -> bool:
        """Wait until the rank that claimed the `number`-th try has told; False if it is not at it any more."""
        look_s = self.post.every_s(_LOOK_EVERY_S)
        patience_s = max(_CARD_COMES_S, 3 * look_s)
        seen, since = self.post.claimed_at(number), time.monotonic()
        while not self.post.told():
            if (claimed := self.post.claimed_at(number)) != seen:
                seen, since = claimed, time.monotonic()
            elif time.monotonic() - since > patience_s:
                return False
            time.sleep(look_s)
        return True

    def missing(self) -> None:
        """In the watchdog: a rank of this host is gone. Say so, within the second that the launcher leaves."""
        self.tell(self.say(), _SILENT_COME_S, to_stderr)

    def given_up(self) -> None:
        """In the training thread: a rank is gone, and there is no round without it any more. Say so, once for all."""
        if self.post.folder is None and len(self.post.ranks) > 1:
            return
        own = replace(self.witness.barely(HERE), memory=process.memory())
        self.post.say(own)
        self.tell(own, _SILENT_COME_S, self.voice.show)

    def stalled(self) -> None:
        """In the watchdog: no progress."""
        self.tell(self.say(STALLED), self._others_come_s(), to_stderr)

    def _write(self, own: Statement, patience_s: float, number: int) -> str:
        layout = RunLayout(self.job.place)
        statements, silent = self._gather(own, patience_s, number)
        kills = process.oom_kills() - self._oom_kills_before
        verdict = blame.judge(statements, silent, oom_kills=kills, shared=self.post.folder is not None)
        waited = blame.waited_for(statements, silent, self.job.parts()) if verdict.kind == blame.STALL else []
        config = layout.config.exists()
        facts = card.make_card(
            verdict,
            statements,
            silent,
            waited,
            time=steady_s(),
            size=len(self.post.ranks),
            run_dir=str(self.job.run_dir),
            checkpoint=self.job.checkpoint(),
            resume=self.job.resume if config else None,
        )
        text = encodable(card.render(verdict, statements, silent, facts, str(RunLayout(self.job.run_dir).failure_json)))
        with suppress(OSError):  # a full disk may be what is to be told
            write_text(layout.failure_text, text)
            write_text(layout.failure_json, json.dumps(facts, indent=1))
        return text

    def _gather(self, own: Statement, patience_s: float, number: int) -> tuple[list[Statement], list[Silent]]:
        """What all ranks said, and of those that said nothing what is known; waits for them a little."""
        deadline = time.monotonic() + patience_s
        known: dict[str, Statement] = {}
        while True:
            self.post.go_on_claiming(number)
            found = {s.who.rank: s for s in self.post.statements(known)}
            found.setdefault(own.who.rank, own)
            states = self.post.states()
            awaited = [
                rank
                for rank in self.post.reachable
                if self.post.hears(rank)
                and rank not in found
                and states.get(rank, process.UNKNOWN) not in (*process.DEAD, process.STOPPED)
            ]
            if not awaited or time.monotonic() >= deadline:
                break
            time.sleep(_LOOK_EVERY_S)
        beats, now = self.post.beats(), steady_s()
        silent = []
        for who in self.post.ranks:
            if who.rank not in found and not self.post.has_left(who.rank):
                last = beats.get(who.rank, {})
                last = {**last, "ago_s": max(0.0, round(now - last["time"], 1))} if "time" in last else {}
                state = states.get(who.rank, process.UNKNOWN)
                if state not in (*process.DEAD, process.STOPPED) and not self.post.hears(who.rank):
                    state = process.UNREACHABLE
                silent.append(Silent(who, state, self.post.fatal(who.rank), last))
        return [found[rank] for rank in sorted(found)], silent


def set_old_aside(run_dir: Path) -> None:
    """Move the card of an earlier failure to RUN/failures/, named by when it was, as the run goes on after it.

    ``failure.json`` in a run folder thus always tells of the run's last start.
    """
    layout = RunLayout(run_dir)
    for path in (layout.failure_text, layout.failure_json):
        with suppress(OSError):
            when = time.strftime("%Y%m%d-%H%M%S", time.gmtime(path.stat().st_mtime))
            layout.old_failures.mkdir(exist_ok=True)
            path.replace(layout.old_failures / f"{when}{path.suffix}")
