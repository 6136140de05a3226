"""RankProcess is to blame, as tables; what is waited for; how ranks and places are named."""

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


CONSEQUENCE = {"consequence": True}

TABLE = {
    "an error": ([failed(1), waiting(0, kind=CURRENT)], [], EXCEPTION, [1], "rank 1 on a failed: ValueError"),
    "the earliest error": ([failed(0, 2.0), failed(1, 1.0), waiting(2)], [], EXCEPTION, [1], "failed first"),
    "an error before its consequences": (
        [failed(0, 1.0, **CONSEQUENCE), failed(1, 2.0)],
        [],
        EXCEPTION,
        [1],
        "rank 1 on a failed: ValueError",
    ),
    "an error, though the launcher has ended another": ([failed(1)], [silent(0, GONE)], EXCEPTION, [1], "rank 1"),
    "the same everywhere": (
        [failed(0, 1.0, everywhere=True), failed(1, 2.0, everywhere=True)],
        [],
        EXCEPTION,
        [0, 1],
        "every rank failed: ValueError",
    ),
    "memory": ([failed(1, memory=True)], [silent(0, RUNNING)], EXCEPTION, [1], "ran out of memory"),
    "a death": (
        [waiting(0, kind=CURRENT)],
        [silent(1, GONE)],
        KILLED,
        [1],
        "rank 1 on a ended without an error message",
    ),
    "a death that Horovod noticed": (
        [failed(0, **CONSEQUENCE)],
        [silent(1, ZOMBIE)],
        KILLED,
        [1],
        "without an error message",
    ),
    "a crash": ([waiting(0)], [silent(1, GONE, crash="Fatal Python error")], KILLED, [1], "crashed in native code"),
    "a stopped process": ([waiting(0)], [silent(1, STOPPED)], STALL, [1], "rank 1 on a is stopped"),
    "a death before a stopped process": ([waiting(0)], [silent(1, STOPPED), silent(2, GONE)], KILLED, [2], "rank 2"),
    "silence": ([waiting(0)], [silent(1, UNKNOWN)], STALL, [1], "does not respond"),
    "silence before those who wait": ([waiting(0), busy(2)], [silent(1, RUNNING)], STALL, [1], "rank 1"),
    "one that does something else": (
        [waiting(0, "gradients/0"), busy(1)],
        [],
        STALL,
        [1],
        "no progress for 612 s: rank 1 on a in data at step 12 for 612.0 s, and the others wait for it",
    ),
    "different collectives": ([waiting(0, "x"), waiting(1, "y")], [], STALL, [0, 1], "wait in different collectives"),
    "a link that was lost when one rank had its sum already": (
        [waiting(0, "y"), waiting(1, "x", "y")],
        [],
        STALL,
        [0, 1],
        "a collective that all ranks have started does not end",
    ),
    "names that come again in another step": (
        [waiting(0, "y"), replace(waiting(1, "x", "y"), step=11)],
        [],
        STALL,
        [0, 1],
        "wait in different collectives",
    ),
    "one collective": ([waiting(0, "x"), waiting(1, "x")], [], STALL, [0, 1], "wait in the same collective"),
    "nobody waits": ([busy(0), busy(1)], [], STALL, [0, 1], "no rank waits for another one"),
    "one rank alone": ([busy(0)], [], STALL, [0], "no progress for 612 s, in data at step 12"),
    "communication that ended": ([failed(0, **CONSEQUENCE)], [], EXCEPTION, [0], "no rank reported an error"),
    "several stopped": ([waiting(0)], [silent(1, STOPPED), silent(2, STOPPED)], STALL, [1, 2], "ranks 1-2 on a are st"),
    "several silent": ([waiting(0)], [silent(1, UNKNOWN), silent(2, UNKNOWN)], STALL, [1, 2], "ranks 1-2 on a do not"),
    "several others": ([waiting(0), busy(1), busy(2)], [], STALL, [1, 2], "and the others wait for them"),
    "no folder is shared": (
        [waiting(0, "x")],
        [silent(1, UNREACHABLE), silent(2, UNREACHABLE)],
        STALL,
        [0, 1, 2],
        "no progress for 600 s on the ranks that share the run folder: rank 0 on a in wait at step 12",
    ),
    "one that works where no folder is shared": (
        [waiting(0, "x"), busy(1)],
        [silent(2, UNREACHABLE)],
        STALL,
        [1, 2],
        "share the run folder: rank 1 on a in data",
    ),
    "a death where no folder is shared": (
        [waiting(0)],
        [silent(1, GONE), silent(2, UNREACHABLE)],
        KILLED,
        [1],
        "rank 1",
    ),
    "communication that ended, and no folder is shared": (
        [failed(0, **CONSEQUENCE)],
        [silent(1, UNREACHABLE)],
        EXCEPTION,
        [0],
        "no rank that shares the run folder reported",
    ),
    "a host that was lost": (
        [failed(0, **CONSEQUENCE)],
        [silent(1, UNKNOWN)],
        KILLED,
        [1],
        "no statement came from rank 1",
    ),
}


@pytest.mark.parametrize("case", TABLE.values(), ids=TABLE.keys())
def test_the_verdict(case: tuple[list[Statement], list[SilentRank], str, list[int], str]) -> None:
    statements, quiet, kind, ranks, words = case
    verdict = find_cause(statements, quiet)
    assert (verdict.kind, verdict.ranks) == (kind, ranks)
    assert words in verdict.sentence


def test_the_out_of_memory_killer_is_named_only_where_it_was_at_work() -> None:
    quiet = [silent(1, GONE)]
    assert "has killed 2 process(es)" in find_cause([waiting(0)], quiet, oom_kills=2).hint
    assert "out-of-memory killer has" not in find_cause([waiting(0)], quiet).hint


def test_who_may_have_spoken_for_himself_did_not_end_without_a_word() -> None:
    verdict = find_cause([waiting(0)], [silent(1, GONE)], shared=False)
    assert verdict.sentence == "rank 1 on a is dead" and "may be above" in verdict.hint
    assert (
        "see the output of ranks 1-2 on a:" in find_cause([waiting(0)], [silent(n, UNREACHABLE) for n in (1, 2)]).hint
    )


def test_unlike_errors_on_all_ranks_are_not_one() -> None:
    other = replace(failed(0), fault=Fault("KeyError", "yes"))
    assert find_cause([other, failed(1, 1.0)], []).ranks == [0]
    assert find_cause([failed(0), failed(1, 1.0)], []).ranks == [0, 1]


def test_what_is_waited_for() -> None:
    statements = [waiting(0, "gradients/0", "gradients/1"), waiting(1, "gradients/1", "totals")]
    parts = {"gradients/0": ["a", "b"]}
    assert pending_collectives(statements, [], parts) == [
        {"name": "gradients/0", "on": [0], "not_on": [1], "parameters": ["a", "b"]},
        {"name": "totals", "on": [1], "not_on": [0], "parameters": []},
    ]
    missing = {
        entry["name"]: entry["not_on"] for entry in pending_collectives(statements[:1], [silent(2, STOPPED)], {})
    }
    assert missing == {"gradients/0": [2], "gradients/1": [2]}
    assert pending_collectives(statements[:1], [silent(2, UNREACHABLE)], {}) == [], "of that one nothing is known"


def test_a_later_phase_carries_what_its_bucket_does() -> None:
    statements = [waiting(0, "gradients/0/shares"), waiting(1, "step/totals")]
    found = {e["name"]: e["parameters"] for e in pending_collectives(statements, [], {"gradients/0": ["a", "b"]})}
    assert found == {"gradients/0/shares": ["a", "b"], "step/totals": []}


def test_what_has_ended_on_one_rank_was_started_there() -> None:
    assert pending_collectives([waiting(0, "gradients/0", "gradients/1"), waiting(1, "gradients/1")], [], {}) == []
