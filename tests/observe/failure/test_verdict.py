from __future__ import annotations

import pytest
from msgspec.structs import replace

from hvdtrain.observe.failure.fault import Fault
from hvdtrain.observe.failure.process_states import GONE, RUNNING, STOPPED, UNKNOWN, UNREACHABLE, ZOMBIE
from hvdtrain.observe.failure.statement import CURRENT, FAILED, STALLED, RankProcess, Statement
from hvdtrain.observe.failure.verdict import EXCEPTION, KILLED, STALL, SilentRank, find_cause, pending_collectives


def who(rank: int, host: str = "a") -> RankProcess:
    return RankProcess(rank, host, 100 + rank, 7)


def failed(rank: int, at_s: float = 0.0, **fault: object) -> Statement:
    return Statement(FAILED, at_s, who(rank), step=3, fault=Fault("ValueError", "no", **fault))  # type: ignore[arg-type]


def waiting(rank: int, *names: str, kind: str = STALLED, idle_s: float = 600.0) -> Statement:
    flight = dict.fromkeys(names, idle_s)
    spans = [("wait", idle_s)]
    return Statement(kind, 0.0, who(rank), step=12, open_spans=spans, idle_s=idle_s, in_flight=flight, is_waiting=True)


def busy(rank: int, span: str = "data", idle_s: float = 612.0) -> Statement:
    return Statement(STALLED, 0.0, who(rank), step=12, open_spans=[(span, idle_s)], idle_s=idle_s)


def silent(rank: int, state: str, **facts: object) -> SilentRank:
    return SilentRank(who(rank), state, **facts)  # type: ignore[arg-type]


ENDED = failed(0, consequence=True)
"""Horovod's error on a rank whose neighbour is dead."""

CASES = {
    EXCEPTION: {
        "an error": ([failed(1), waiting(0, kind=CURRENT)], [], [1], "rank 1 on a failed: ValueError"),
        "the earliest error": ([failed(0, 2.0), failed(1, 1.0), waiting(2)], [], [1], "failed first"),
        "an error before its consequences": ([ENDED, failed(1, 2.0)], [], [1], "rank 1"),
        "an error, though the launcher has ended another": ([failed(1)], [silent(0, GONE)], [1], "rank 1"),
        "the same everywhere": ([failed(n, n, everywhere=True) for n in (0, 1)], [], [0, 1], "every rank"),
        "equal on all": ([failed(0), failed(1, 1.0)], [], [0, 1], "every rank"),
        "unlike on all": ([replace(failed(0), fault=Fault("KeyError", "yes")), failed(1, 1.0)], [], [0], "KeyError"),
        "memory": ([failed(1, memory=True)], [silent(0, RUNNING)], [1], "ran out of memory"),
        "communication that ended": ([ENDED], [], [0], "no rank reported"),
        "it ended, and no folder is shared": ([ENDED], [silent(1, UNREACHABLE)], [0], "no rank that shares"),
    },
    KILLED: {
        "a death": ([waiting(0, kind=CURRENT)], [silent(1, GONE)], [1], "rank 1 on a ended without"),
        "a death that Horovod noticed": ([ENDED], [silent(1, ZOMBIE)], [1], "without an error"),
        "a crash": ([waiting(0)], [silent(1, GONE, crash="Fatal Python error")], [1], "native code"),
        "a death before a stop": ([waiting(0)], [silent(1, STOPPED), silent(2, GONE)], [2], "rank 2"),
        "no folder is shared": ([waiting(0)], [silent(1, GONE), silent(2, UNREACHABLE)], [1], "rank 1"),
        "a host that was lost": ([ENDED], [silent(1, UNKNOWN)], [1], "no statement came from rank 1"),
    },
    STALL: {
        "a stopped process": ([waiting(0)], [silent(1, STOPPED)], [1], "rank 1 on a is stopped"),
        "several stopped": ([waiting(0)], [silent(1, STOPPED), silent(2, STOPPED)], [1, 2], "ranks 1-2 on a are st"),
        "silence": ([waiting(0)], [silent(1, UNKNOWN)], [1], "does not respond"),
        "several silent": ([waiting(0)], [silent(1, UNKNOWN), silent(2, UNKNOWN)], [1, 2], "ranks 1-2 on a do not"),
        "silence before those who wait": ([waiting(0), busy(2)], [silent(1, RUNNING)], [1], "rank 1"),
        "one does something else": ([waiting(0, "x"), busy(1)], [], [1], "612 s: rank 1 on a in data at step 12"),
        "several others": ([waiting(0), busy(1), busy(2)], [], [1, 2], "the others wait for them"),
        "different collectives": ([waiting(0, "x"), waiting(1, "y")], [], [0, 1], "different collectives"),
        "a link was lost when one rank had its sum": (
            *([waiting(0, "y"), waiting(1, "x", "y")], [], [0, 1]),
            "all ranks have started",
        ),
        "names that come again in another step": (
            *([waiting(0, "y"), replace(waiting(1, "x", "y"), step=11)], [], [0, 1]),
            "different collectives",
        ),
        "one collective": ([waiting(0, "x"), waiting(1, "x")], [], [0, 1], "the same collective"),
        "nobody waits": ([busy(0), busy(1)], [], [0, 1], "no rank waits"),
        "one rank alone": ([busy(0)], [], [0], "612 s, in data at step 12"),
        "no folder is shared": (
            *([waiting(0, "x")], [silent(1, UNREACHABLE), silent(2, UNREACHABLE)], [0, 1, 2]),
            "share the run folder: rank 0 on a in wait",
        ),
        "one works where no folder is shared": (
            *([waiting(0, "x"), busy(1)], [silent(2, UNREACHABLE)], [1, 2]),
            "share the run folder: rank 1 on a in data",
        ),
    },
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, cases in CASES.items() for name in cases])
def test_the_verdict(kind: str, name: str) -> None:
    statements, quiet, ranks, words = CASES[kind][name]
    verdict = find_cause(statements, quiet)
    assert (verdict.kind, verdict.ranks) == (kind, ranks)
    assert words in verdict.sentence


def test_hints_name_the_out_of_memory_killer_only_where_it_was_at_work_and_outputs_that_are_elsewhere() -> None:
    quiet = [silent(1, GONE)]
    assert "killed 2 process(es)" in find_cause([waiting(0)], quiet, oom_kills=2).hint
    assert "out-of-memory killer has" not in find_cause([waiting(0)], quiet).hint
    verdict = find_cause([waiting(0)], quiet, shared=False)
    assert verdict.sentence == "rank 1 on a is dead" and "above" in verdict.hint, "it may have spoken for itself"
    assert "ranks 1-2 on a" in find_cause([waiting(0)], [silent(n, UNREACHABLE) for n in (1, 2)]).hint


def test_what_is_waited_for() -> None:
    statements = [waiting(0, "gradients/0/shares", "gradients/1"), waiting(1, "gradients/1", "totals")]
    assert pending_collectives(statements, [], {"gradients/0": ["a", "b"]}) == [  # also of a later phase of the bucket
        {"name": "gradients/0/shares", "on": [0], "not_on": [1], "parameters": ["a", "b"]},
        {"name": "totals", "on": [1], "not_on": [0], "parameters": []},
    ]
    alone, stopped = [waiting(0, "gradients/0")], [silent(2, STOPPED)]
    expected = {"name": "gradients/0", "on": [0], "not_on": [2], "parameters": ["a"]}
    assert pending_collectives(alone, stopped, {"gradients/0": ["a"]}) == [expected]
    assert pending_collectives(alone, [silent(2, UNREACHABLE)], {}) == [], "of that one nothing is known"
    ended = [waiting(0, "gradients/0", "gradients/1"), waiting(1, "gradients/1")]
    assert pending_collectives(ended, [], {}) == [], "what has ended on one rank was started there"
