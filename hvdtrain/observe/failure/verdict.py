"""Who is to blame: from what ranks said, and from the silence of others, one verdict. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.observe.failure.process import DEAD, RUNNING, STOPPED, UNKNOWN, UNREACHABLE
from hvdtrain.observe.failure.rank_names import agree, grouped, label, labels, place
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


def judge(
    statements: Sequence[Statement], silent: Sequence[Silent], *, oom_kills: int = 0, shared: bool = True
) -> Verdict:
    """The verdict.

    An error that is no mere consequence of another comes before processes that are gone (the launcher ends what is
    left once a rank has failed), these before stopped ones, and these before ranks that do something else than wait for
    the others. Of several errors the earliest counts, by the hosts' clocks.

    Args:
        statements: one a rank at most, one at least.
        silent: all other ranks.
        oom_kills: processes of this host that its kernel killed for want of memory since the run began.
        shared: whether this rank sees the folder in which ranks leave word; without it those that are gone may have
            spoken for themselves.
    """
    errors = sorted((s for s in statements if s.fault is not None), key=lambda s: s.time)
    original = [s for s in errors if s.fault is not None and not s.fault.consequence]
    dead = [s for s in silent if s.state in DEAD]
    if original:
        return _error(original, len(statements) + len(silent))
    if dead:
        return _killed(dead, oom_kills, shared)
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


def _killed(dead: Sequence[Silent], oom_kills: int, shared: bool) -> Verdict:
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
    if not shared:
        hint = f"what it said itself may stand above, as the run folder is not shared. If nothing does: {hint}"
        return Verdict(KILLED, ranks, f"{whom} {agree(dead, 'is', 'are')} gone", hint)
    return Verdict(KILLED, ranks, f"{whom} ended without a word", hint)


def _stopped(stopped: Sequence[Silent]) -> Verdict:
    hint = "something sent SIGSTOP (a debugger, a shell's Ctrl-Z, a scheduler that suspends jobs)"
    return Verdict(
        STALL,
        [s.who.rank for s in stopped],
        f"{labels(s.who for s in stopped)} {agree(stopped, 'is', 'are')} stopped",
        hint,
    )


def _ended(first: Statement, silent: Sequence[Silent]) -> Verdict:
    lost = [s for s in silent if s.state != UNREACHABLE]
    sentence = "communication ended, and no rank says why"
    hint = "see what the launcher and Horovod print around this"
    if lost:
        whom = labels(s.who for s in lost)
        return Verdict(KILLED, [s.who.rank for s in lost], f"{sentence}; nothing was heard of {whom}", hint)
    if silent:
        hint = f"see what {labels(s.who for s in silent)} say themselves: the run folder is not shared with them"
        return Verdict(EXCEPTION, [first.who.rank], "communication ended, and no rank that is heard says why", hint)
    return Verdict(EXCEPTION, [first.who.rank], sentence, hint)


def _stall(statements: Sequence[Statement], silent: Sequence[Silent]) -> Verdict:
    seconds = max((s.idle_s for s in statements if s.kind == STALLED), default=0.0)
    none = f"no progress for {seconds:.0f} s"
    unheard = [s for s in silent if s.state == UNREACHABLE]
    silent = [s for s in silent if s.state != UNREACHABLE]
    if silent:
        alive = all(s.state == RUNNING for s in silent)
        hint = (
            "the process runs: native code holds Python's interpreter lock there"
            if alive
            else "the host or its storage is gone, or native code holds Python's interpreter lock there"
        )
        whom = f"{labels(s.who for s in silent)} {agree(silent, 'says', 'say')}"
        return Verdict(STALL, [s.who.rank for s in silent], f"{none}: {whom} nothing any more", hint)
    busy = [s for s in statements if not s.waits]
    if unheard:
        return _half_heard(none, busy or statements, unheard)
    if len(statements) == 1:
        return Verdict(STALL, [statements[0].who.rank], f"{none}, {place(statements[0])}")
    if busy and len(busy) < len(statements):
        where = "; ".join(f"{who} {place(s)}" for who, s in grouped(busy))
        they = agree(busy, "it", "them")
        return Verdict(STALL, [s.who.rank for s in busy], f"{none}: {where}, and the others wait for {they}")
    everyone = [s.who.rank for s in statements]
    if busy:
        return Verdict(STALL, everyone, f"{none} on any rank, and none waits for another")
    stuck = "the network between the hosts or MPI is stuck; the launcher's and the network's logs may tell"
    if len({frozenset(s.in_flight) for s in statements}) == 1:
        return Verdict(STALL, everyone, f"{none}: all ranks wait in the same collective, and it does not end", stuck)
    if _started_by_all(statements):
        return Verdict(STALL, everyone, f"{none}: a collective that all ranks have started does not end", stuck)
    return Verdict(
        STALL,
        everyone,
        f"{none}: the ranks wait for different things",
        "they took different ways through the program: look for a branch that depends on the rank or on its data",
    )


def _started_by_all(statements: Sequence[Statement]) -> bool:
    """Whether what the rank that is furthest waits for is under way on every rank: what it lacks has ended there."""
    furthest = min(statements, key=lambda s: len(s.in_flight))
    return bool(furthest.in_flight) and all(
        s.waits and s.step == furthest.step and furthest.in_flight.keys() <= s.in_flight.keys() for s in statements
    )


def _half_heard(none: str, there: Sequence[Statement], unheard: Sequence[Silent]) -> Verdict:
    """Where some ranks don't share the run folder: what is known of those that do."""
    where = "; ".join(f"{who} {place(s)}" for who, s in grouped(there))
    hint = f"see what {labels(s.who for s in unheard)} say themselves: the run folder is not shared with them"
    ranks = sorted([*(s.who.rank for s in there), *(s.who.rank for s in unheard)])
    return Verdict(STALL, ranks, f"{none} that is heard of: {where}", hint)


def waited_for(
    statements: Sequence[Statement], silent: Sequence[Silent], parts: Mapping[str, Sequence[str]]
) -> list[dict[str, Any]]:
    """Collectives that some ranks have started and others have not: [{name, on, not_on, parameters}].

    Args:
        statements: of ranks that spoke.
        silent: ranks that did not, of which it is not known: they stand among those that have not, but for those that
            cannot be heard.
        parts: names of the parameters whose gradients a collective carries, by what its name begins with.
    """
    if not silent and _started_by_all(statements):
        return []
    names = list(dict.fromkeys(name for s in statements for name in s.in_flight))
    mute = [s.who.rank for s in silent if s.state != UNREACHABLE]
    table = []
    for name in names:
        on = [s.who.rank for s in statements if name in s.in_flight]
        absent = sorted([s.who.rank for s in statements if name not in s.in_flight] + mute)
        if absent:
            table.append({"name": name, "on": on, "not_on": absent, "parameters": _carried(parts, name)})
    return table


def _carried(parts: Mapping[str, Sequence[str]], name: str) -> list[str]:
    """What a collective carries; one of several phases has a name of its own behind that of the bucket."""
    return list(parts.get(name) or parts.get(name.rpartition("/")[0]) or [])
