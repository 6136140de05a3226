"""Find the cause of a failure from the statements of ranks and the silence of others. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from hvdtrain.observe.failure.process_states import DEAD, RUNNING, STOPPED, UNKNOWN, UNREACHABLE
from hvdtrain.observe.failure.statement import STALLED, RankProcess, Statement, agree, grouped, label, labels, place

EXCEPTION, KILLED, STALL = "exception", "killed", "stall"
"""Kinds of failures: an error was raised; a process ended without a statement; no progress."""


class SilentRank(Struct, frozen=True, rename={"process": "who"}):
    """A rank without a statement."""

    process: RankProcess
    state: str = UNKNOWN  # of its process, see `process_states`
    crash: str = ""  # the trace that Python's faulthandler wrote
    last: dict[str, Any] = {}  # its last heartbeat: time, step, rss


class Verdict(Struct, frozen=True):
    """The cause of a failure."""

    kind: str  # EXCEPTION, KILLED or STALL
    ranks: list[int]  # the ranks that caused it; all ranks if none differs from the others
    sentence: str
    hint: str = ""


def find_cause(
    statements: Sequence[Statement], silent: Sequence[SilentRank], *, oom_kills: int = 0, shared: bool = True
) -> Verdict:
    """Return the cause of a failure, from one statement or more, and what is known of all other ranks.

    Causes in order of priority: an error that is not the consequence of another one; dead processes (the launcher
    kills the other ranks after one has failed); stopped processes; ranks that do not wait for the others. The earliest
    error counts, by the clocks of the hosts.

    `oom_kills`: processes that this host's kernel killed since the run began, because memory ran out. `shared`: whether
    this rank sees the folder of the statements. Without it, dead ranks may have reported for themselves.
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
        hint = "something sent SIGSTOP: a debugger, Ctrl-Z in a shell, or a scheduler that suspends jobs"
        sentence = f"{labels(s.process for s in stopped)} {agree(stopped, 'is', 'are')} stopped"
        return Verdict(STALL, [s.process.rank for s in stopped], sentence, hint)
    return _ended(errors[0], silent) if errors else _stall(statements, silent)


def _error(errors: Sequence[Statement], size: int) -> Verdict:
    first = errors[0]
    assert first.fault is not None
    texts = {(s.fault.type, s.fault.message) for s in errors if s.fault is not None}
    if size > 1 and (first.fault.everywhere or (len(errors) == size and len(texts) == 1)):
        return Verdict(EXCEPTION, [s.process.rank for s in errors], f"every rank failed: {first.fault.type}")
    ahead = " first" if len(errors) > 1 else ""
    how = "ran out of memory" if first.fault.memory else "failed"
    return Verdict(EXCEPTION, [first.process.rank], f"{label(first.process)} {how}{ahead}: {first.fault.type}")


def _killed(dead: Sequence[SilentRank], oom_kills: int, shared: bool) -> Verdict:
    ranks = [s.process.rank for s in dead]
    whom = labels(s.process for s in dead)
    if any(s.crash for s in dead):
        return Verdict(KILLED, ranks, f"{whom} crashed in native code", "the Python stack is in the details")
    if oom_kills:
        hint = (
            f"the kernel's out-of-memory killer has killed {oom_kills} process(es) on this host since the run began:"
            " lower --train.micro_batch or --loader.workers, or run fewer ranks on each host"
        )
    else:
        hint = (
            "it was killed (SIGKILL) or native code ended it; the launcher prints the signal. If nobody killed it on"
            " purpose, check dmesg and the scheduler's log: a memory limit kills processes this way"
        )
    if not shared:
        hint = f"the run folder is not shared, so its own report may be above. If there is none: {hint}"
        return Verdict(KILLED, ranks, f"{whom} {agree(dead, 'is', 'are')} dead", hint)
    return Verdict(KILLED, ranks, f"{whom} ended without an error message", hint)


def _ended(first: Statement, silent: Sequence[SilentRank]) -> Verdict:
    lost = [s for s in silent if s.state != UNREACHABLE]
    sentence = "communication ended, and no rank reported an error"
    hint = "see the messages of the launcher and of Horovod around this one"
    if lost:
        whom = labels(s.process for s in lost)
        return Verdict(KILLED, [s.process.rank for s in lost], f"{sentence}; no statement came from {whom}", hint)
    if silent:
        sentence = "communication ended, and no rank that shares the run folder reported an error"
        hint = f"see the output of {labels(s.process for s in silent)}: the run folder is not shared with them"
    return Verdict(EXCEPTION, [first.process.rank], sentence, hint)


def _stall(statements: Sequence[Statement], silent: Sequence[SilentRank]) -> Verdict:
    seconds = max((s.idle_s for s in statements if s.kind == STALLED), default=0.0)
    none = f"no progress for {seconds:.0f} s"
    unreachable = [s for s in silent if s.state == UNREACHABLE]
    silent = [s for s in silent if s.state != UNREACHABLE]
    if silent:
        alive, lock = all(s.state == RUNNING for s in silent), "native code there holds Python's interpreter lock"
        hint = f"the process runs: {lock}" if alive else f"the host or its storage is lost, or {lock}"
        whom = f"{labels(s.process for s in silent)} {agree(silent, 'does', 'do')}"
        return Verdict(STALL, [s.process.rank for s in silent], f"{none}: {whom} not respond", hint)
    working = [s for s in statements if not s.is_waiting]
    if unreachable:
        there = working or statements
        where = "; ".join(f"{ranks} {place(s)}" for ranks, s in grouped(there))
        hint = f"see the output of {labels(s.process for s in unreachable)}: the run folder is not shared with them"
        ranks = sorted([*(s.process.rank for s in there), *(s.process.rank for s in unreachable)])
        return Verdict(STALL, ranks, f"{none} on the ranks that share the run folder: {where}", hint)
    if len(statements) == 1:
        return Verdict(STALL, [statements[0].process.rank], f"{none}, {place(statements[0])}")
    if working and len(working) < len(statements):
        where = "; ".join(f"{ranks} {place(s)}" for ranks, s in grouped(working))
        they = agree(working, "it", "them")
        return Verdict(STALL, [s.process.rank for s in working], f"{none}: {where}, and the others wait for {they}")
    everyone = [s.process.rank for s in statements]
    if working:
        return Verdict(STALL, everyone, f"{none} on any rank, and no rank waits for another one")
    stuck = "the network between the hosts or MPI is stuck; check the logs of the launcher and the network"
    if len({frozenset(s.in_flight) for s in statements}) == 1:
        return Verdict(STALL, everyone, f"{none}: all ranks wait in the same collective, which does not end", stuck)
    if _started_by_all(statements):
        return Verdict(STALL, everyone, f"{none}: a collective that all ranks have started does not end", stuck)
    hint = "they took different branches of the program: look for one that depends on the rank or on its data"
    return Verdict(STALL, everyone, f"{none}: the ranks wait in different collectives", hint)


def _started_by_all(statements: Sequence[Statement]) -> bool:
    """Return whether every rank has started the collectives that the furthest rank waits for.

    Collectives that the furthest rank no longer has in flight have ended there.
    """
    furthest = min(statements, key=lambda s: len(s.in_flight))
    return bool(furthest.in_flight) and all(
        s.is_waiting and s.step == furthest.step and furthest.in_flight.keys() <= s.in_flight.keys() for s in statements
    )


def pending_collectives(
    statements: Sequence[Statement], silent: Sequence[SilentRank], parameters: Mapping[str, Sequence[str]]
) -> list[dict[str, Any]]:
    """Return the collectives that some ranks have started and others have not: [{name, on, not_on, parameters}].

    Ranks without a statement count as not started, except for those that are not reachable. `parameters` with gradients
    in a collective are by the beginning of its name.
    """
    if not silent and _started_by_all(statements):
        return []
    names = list(dict.fromkeys(name for s in statements for name in s.in_flight))
    mute = [s.process.rank for s in silent if s.state != UNREACHABLE]
    table = []
    for name in names:
        on = [s.process.rank for s in statements if name in s.in_flight]
        absent = sorted([s.process.rank for s in statements if name not in s.in_flight] + mute)
        if absent:
            # The name of a later phase has a suffix after the name of its bucket.
            of = list(parameters.get(name) or parameters.get(name.rpartition("/")[0]) or [])
            table.append({"name": name, "on": on, "not_on": absent, "parameters": of})
    return table
