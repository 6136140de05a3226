"""Who is to blame: from what ranks said, and from the silence of others, one verdict. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.observe.failure.process import DEAD, RUNNING, STOPPED, UNKNOWN
from hvdtrain.observe.failure.statement import STALLED, Statement, Who

EXCEPTION, KILLED, STALL = "exception", "killed", "stall"
"""Kinds of failures: an error was raised; a process ended without a word; no progress."""


@dataclass(frozen=True)
class Silent:
    """A rank that said nothing.

    Attributes:
        who: the rank.
        state: of its process, see `process`.
        crash: what Python's faulthandler wrote of it.
        last: what it last left of itself: time, step, rss.
    """

    who: Who
    state: str = UNKNOWN
    crash: str = ""
    last: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """What is to be said first.

    Attributes:
        kind: EXCEPTION, KILLED or STALL.
        ranks: those to blame; all of them where none stands out.
        sentence: what happened.
        hint: what it may come from, and what to do.
    """

    kind: str
    ranks: list[int]
    sentence: str
    hint: str = ""


def judge(statements: Sequence[Statement], silent: Sequence[Silent], *, oom_kills: int = 0) -> Verdict:
    """The verdict.

    An error that is no mere consequence of another comes before processes that are gone (the launcher ends what is
    left once a rank has failed), these before stopped ones, and these before ranks that do something else than wait for
    the others. Of several errors the earliest counts, by the hosts' clocks.

    Args:
        statements: one a rank at most, one at least.
        silent: all other ranks.
        oom_kills: processes of this host that its kernel killed for want of memory since the run began.
    """
    errors = sorted((s for s in statements if s.fault is not None), key=lambda s: s.time)
    original = [s for s in errors if s.fault is not None and not s.fault.consequence]
    dead = [s for s in silent if s.state in DEAD]
    if original:
        return _error(original, len(statements) + len(silent))
    if dead:
        return _killed(dead, oom_kills)
    stopped = [s for s in silent if s.state == STOPPED]
    if stopped:
        return _stopped(stopped)
    if errors:
        return _ended(errors[0], silent)
    return _stall(statements, silent)


def _error(errors: Sequence[Statement], size: int) -> Verdict:
    first = errors[0]
    assert first.fault is not None
    if size > 1 and (first.fault.everywhere or (len(errors) == size and len({_text(s) for s in errors}) == 1)):
        return Verdict(EXCEPTION, [s.who.rank for s in errors], f"every rank failed: {first.fault.type}")
    ahead = " first" if len(errors) > 1 else ""
    how = "ran out of memory" if first.fault.memory else "failed"
    return Verdict(EXCEPTION, [first.who.rank], f"{label(first.who)} {how}{ahead}: {first.fault.type}")


def _text(statement: Statement) -> str:
    return f"{statement.fault.type}: {statement.fault.message}" if statement.fault else ""


def _killed(dead: Sequence[Silent], oom_kills: int) -> Verdict:
    ranks = [s.who.rank for s in dead]
    whom = labels(s.who for s in dead)
    if any(s.crash for s in dead):
        return Verdict(KILLED, ranks, f"{whom} crashed in native code", "where in Python stands below")
    if oom_kills:
        hint = (
            f"the kernel's out-of-memory killer has ended {oom_kills} process(es) of this host since the run began:"
            " lower --train.micro_batch or --loader.workers, or run fewer ranks a host"
        )
    else:
        hint = (
            "killed (SIGKILL) or ended by native code; the launcher says by which signal. If nobody did it on purpose,"
            " see dmesg and the scheduler's log: a memory limit ends processes in this way"
        )
    return Verdict(KILLED, ranks, f"{whom} ended without a word", hint)


def _stopped(stopped: Sequence[Silent]) -> Verdict:
    hint = "something sent it SIGSTOP (a debugger, a shell's Ctrl-Z, a scheduler that suspends jobs)"
    return Verdict(STALL, [s.who.rank for s in stopped], f"{labels(s.who for s in stopped)} is stopped", hint)


def _ended(first: Statement, silent: Sequence[Silent]) -> Verdict:
    lost = [s.who.rank for s in silent]
    sentence = "communication ended, and no rank says why"
    hint = "see what the launcher and Horovod print around this"
    if lost:
        return Verdict(KILLED, lost, f"{sentence}; nothing was heard of {labels(s.who for s in silent)}", hint)
    return Verdict(EXCEPTION, [first.who.rank], sentence, hint)


def _stall(statements: Sequence[Statement], silent: Sequence[Silent]) -> Verdict:
    seconds = max((s.idle_s for s in statements if s.kind == STALLED), default=0.0)
    none = f"no progress for {seconds:.0f} s"
    if silent:
        alive = all(s.state == RUNNING for s in silent)
        hint = (
            "its process runs: native code holds Python's interpreter lock there"
            if alive
            else "its host or its storage is gone, or native code holds Python's interpreter lock there"
        )
        return Verdict(
            STALL, [s.who.rank for s in silent], f"{none}: {labels(s.who for s in silent)} says nothing any more", hint
        )
    busy = [s for s in statements if not s.waits]
    if len(statements) == 1:
        return Verdict(STALL, [statements[0].who.rank], f"{none}, {place(statements[0])}")
    if busy and len(busy) < len(statements):
        return Verdict(
            STALL,
            [s.who.rank for s in busy],
            f"{none}: {'; '.join(f'{who} {place(s)}' for who, s in grouped(busy))}, and the others wait for it",
        )
    everyone = [s.who.rank for s in statements]
    if busy:
        return Verdict(STALL, everyone, f"{none} on any rank, and none waits for another")
    if len({tuple(sorted(s.in_flight)) for s in statements}) > 1:
        return Verdict(
            STALL,
            everyone,
            f"{none}: the ranks wait for different things",
            "they took different ways through the program: look for a branch that depends on the rank or on its data",
        )
    return Verdict(
        STALL,
        everyone,
        f"{none}: all ranks wait in the same collective, and it does not end",
        "the network between the hosts or MPI is stuck; the launcher's and the network's logs may tell",
    )


def waited_for(
    statements: Sequence[Statement], silent: Sequence[Silent], parts: Mapping[str, Sequence[str]]
) -> list[dict[str, Any]]:
    """Collectives that some ranks have started and others have not: [{name, on, not_on, parameters}].

    Args:
        statements: of ranks that spoke.
        silent: ranks that did not, of which it is not known: they stand among those that have not.
        parts: names of the parameters whose gradients a collective carries.
    """
    names = list(dict.fromkeys(name for s in statements for name in s.in_flight))
    table = []
    for name in names:
        on = [s.who.rank for s in statements if name in s.in_flight]
        absent = sorted([s.who.rank for s in statements if name not in s.in_flight] + [s.who.rank for s in silent])
        if absent:
            table.append({"name": name, "on": on, "not_on": absent, "parameters": list(parts.get(name, []))})
    return table


def place(statement: Statement) -> str:
    """Where a rank is: ``in wait at step 12 for 3.1 s, waiting for gradients/0``."""
    if statement.open:
        name, seconds = statement.open[-1]
        text = f"in {name} {at(statement.step)} for {seconds:.1f} s"
    else:
        text = at(statement.step) + (f", last in {statement.last}" if statement.last else "")
        text += f" for {statement.idle_s:.1f} s" if statement.waits or statement.kind == STALLED else ""
    names = list(statement.in_flight)
    if names and statement.fault is None:
        verb = "waiting for" if statement.waits else "with"
        text += f", {verb} {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return text


def at(step: int) -> str:
    """``at step 3``, or before the first."""
    return f"at step {step}" if step else "before the first step"


def grouped(statements: Iterable[Statement]) -> list[tuple[str, Statement]]:
    """Statements of ranks at one place taken together: who they are, and the one that is there longest."""
    groups: dict[tuple[Any, ...], list[Statement]] = {}
    for s in statements:
        error = s.fault.type if s.fault else ""
        inside = s.open[-1][0] if s.open else ""
        groups.setdefault((s.step, inside, tuple(s.in_flight), s.waits, error), []).append(s)
    return [(labels(s.who for s in group), max(group, key=lambda s: s.idle_s)) for group in groups.values()]


def label(who: Who) -> str:
    """``rank 3 on host``."""
    return f"rank {who.rank} on {who.host}"


def labels(whos: Iterable[Who]) -> str:
    """``rank 3 on host``, ``ranks 1-3, 5``."""
    members = sorted(whos, key=lambda who: who.rank)
    if len(members) == 1:
        return label(members[0])
    hosts = {who.host for who in members}
    return f"ranks {ranges([who.rank for who in members])}" + (f" on {hosts.pop()}" if len(hosts) == 1 else "")


def ranges(numbers: Sequence[int]) -> str:
    """``1-3, 5`` of 1, 2, 3, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
