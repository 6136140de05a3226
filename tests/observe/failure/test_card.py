from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from hvdtrain.errors import DataError
from hvdtrain.observe.failure.card import Failure, make_card, render
from hvdtrain.observe.failure.fault import fault
from hvdtrain.observe.failure.process_states import GONE
from hvdtrain.observe.failure.statement import CURRENT, FAILED, STALLED, RankProcess, Statement
from hvdtrain.observe.failure.verdict import SilentRank, Verdict, find_cause, pending_collectives

FACTS = {"time": 1.0, "size": 2, "run_dir": "run", "checkpoint": "run/checkpoints/step-000100", "resume": "again"}
MEMORY = {"rss": 400.0, "peak_rss": 500.0, "host_available": 1000.0, "host_total": 2000.0}


def _statement(rank: int, kind: str = CURRENT, **facts: Any) -> Statement:
    return Statement(kind, 0.0, RankProcess(rank, "a", 100 + rank, 7), step=3, memory=MEMORY, **facts)


def _failed(error: Exception, rank: int = 1, **facts: Any) -> Statement:
    try:
        raise error
    except Exception as caught:
        return _statement(rank, FAILED, fault=fault(caught), **facts)


def _text(statements: list[Statement], silent: list[SilentRank] | None = None) -> str:
    verdict = find_cause(statements, silent or [])
    waited = pending_collectives(statements, silent or [], {"gradients/0": ["a", "b"]})
    failure = Failure(verdict, statements, silent or [], waited)
    return render(failure, make_card(failure, **FACTS), "F")


def test_json_holds_everything_and_gives_the_same_statements_again() -> None:
    statements = [_failed(ValueError("no"), in_flight={"x": 1.0}), _statement(0, open_spans=[("wait", 1.0)])]
    again = json.loads(json.dumps(make_card(Failure(find_cause(statements, []), statements, []), **FACTS)))
    assert msgspec.convert(again["statements"], list[Statement]) == statements
    assert again["format"] == 1 and FACTS.items() <= again.items()


def test_a_users_error_is_shown_by_its_parts_others_by_their_traceback() -> None:
    shown = _text([_failed(DataError("a sample is missing", expected="samples", next_step="bring some"))])
    assert "rank 1 on a failed: DataError" in shown
    assert "a sample is missing\n  expected: samples\n  next: bring some" in shown
    assert "Traceback" not in shown
    shown = _text([_failed(ValueError("no"))])
    assert "test_card.py" in shown and "ValueError: no" in shown


def test_a_stall_shows_what_is_waited_for_and_the_stacks_of_equal_ranks_once() -> None:
    waits = {"is_waiting": True, "in_flight": {"gradients/0": 600.0}, "stacks": {"training": ["  in synchronize"]}}
    sleeps = {"stacks": {"training": ["  in sleep"]}, "open_spans": [("data", 600.0)], "idle_s": 600.0}
    shown = _text([*(_statement(rank, STALLED, **waits) for rank in (0, 2)), _statement(1, STALLED, **sleeps)])
    assert "gradients/0  started by rank(s) 0, 2, not by 1 (a, b)" in shown
    assert shown.count("in synchronize") == 1 and shown.count("in sleep") == 1
    assert shown.index("in sleep") < shown.index("in synchronize"), "the one to blame comes first"
    alone = _text([_statement(0, STALLED, **sleeps)])
    assert "where the" not in alone and alone.count("in data at step 3 for 600.0 s") == 1


def test_a_crash_shows_the_thread_it_happened_in() -> None:
    crash = "Fatal Python error: Segmentation fault\n\nThread 0x1:\n  idle\n\nCurrent thread 0x2:\n  at fault\n\nExtens"
    silent = SilentRank(RankProcess(1, "a", 101, 7), GONE, crash, {"ago_s": 4.0, "step": 2, "rss": 300.0})
    shown = _text([_statement(0)], [silent])
    assert "Segmentation fault" in shown and "at fault" in shown
    assert "idle" not in shown and "Extens" not in shown
    assert "rank 1 on a was last seen alive 4 s before, at step 2" in shown
    assert "300 MiB when last seen alive" in shown


HELD = {"where": "GPU", "mib": {"parameters": 100.0, "the rest": 900.0}, "micro_batch": 4, "precision": "fp32",
        "module": "layers.3.mlp", "largest": {"head.weight": 80.0, "embed.weight": 20.0},
        "advice": ["--memory.checkpointing full: less"]}  # fmt: skip


def test_memory_that_ran_out_is_explained() -> None:
    statement = _failed(MemoryError("no"), memory_holders=HELD)
    shown = _text([replace(statement, memory={**MEMORY, "cuda_allocated": 1000.0, "cuda_reserved": 3000.0})])
    small = ("--train.micro_batch 2 (is 4)", "--precision bf16", "expandable_segments:True")
    held = ("ran out of memory", "100.0 MiB", "900.0 MiB", "layers.3.mlp", "head.weight 80.0 MiB", "--memory.")
    assert all(part in shown for part in (*small, *held)) and "fewer ranks on this host" not in shown
    full = replace(statement, memory={**MEMORY, "cuda_allocated": 2900.0, "cuda_reserved": 3000.0})
    shown = _text([replace(full, memory_holders={**HELD, "micro_batch": 1, "precision": "bf16", "where": "host"})])
    assert "fewer ranks on this host" in shown and not any(part in shown for part in (*small, "nvidia-smi"))
    for outside, has_others in ((1500.0, False), (9000.0, True)):
        unused = {"free": 3000.5, "largest": 20.0, "outside": outside}
        shown = _text([_failed(MemoryError("no"), memory_holders={**HELD, "unused": unused})])
        assert "3,000.5 MiB" in shown and ("nvidia-smi" in shown) is has_others


def _essentials(text: str) -> list[str]:
    lines = text.splitlines()
    return lines[next(n for n, line in enumerate(lines) if " the run failed " in line) :]


PARTS = DataError("what " * 80, expected="this " * 80, next_step="that " * 80)
MESSAGE = ValueError("line\n" * 100 + "the end")


@pytest.mark.parametrize(
    ("kind", "sentence", "hint", "error", "dead"),
    [
        ("killed", "rank 1 failed", "word " * 60, ValueError("no"), 0),
        ("stall", "word " * 300, "", ValueError("no"), 0),
        ("exception", "rank 1 failed", "", PARTS, 0),
        ("exception", "rank 1 failed", "", MESSAGE, 0),
        ("killed", "rank 1 failed", "", ValueError("no"), 100),
    ],
    ids=["hint", "sentence", "parts", "message", "dead ranks"],
)
def test_the_essentials_are_last_and_fit_a_small_terminal(
    kind: str, sentence: str, hint: str, error: Exception, dead: int
) -> None:
    """A terminal has 25 lines of 80 columns, and mpirun prints up to 10 lines after the card."""
    last = {"ago_s": 1.0, "step": 2}
    silent = [SilentRank(RankProcess(n, "a", n, 7), GONE, "", last) for n in range(2, 2 + dead)]
    verdict = Verdict(kind, [1, *(s.process.rank for s in silent)], sentence, hint)
    failure = Failure(verdict, [_failed(error), _statement(0)], silent)
    text = render(failure, make_card(failure, **FACTS), "run/failure.json")
    essentials = _essentials(text)
    assert len(essentials) <= 20 and max(map(len, essentials)) <= 80
    for part in (FACTS["checkpoint"], FACTS["resume"], "run/failure.json"):
        assert any(str(part) in line for line in essentials), part
    assert text.count("word") >= sentence.count("word"), "the details have the whole sentence"


def test_the_last_lines_of_a_users_error() -> None:
    """What a person sees first: rank, message, the user's own line, checkpoint and command; before them the others."""
    error = _failed(ValueError("the labels are out of range"))
    shown = _text([error, _statement(0, open_spans=[("wait", 2.0)], in_flight={"x": 2.0}, is_waiting=True)])
    assert "waiting for x" in shown[: shown.index("rank 1 on a failed")]
    frame = f"_failed, {__file__}:{_failed.__code__.co_firstlineno + 2}"
    parts = ("rank 1 on a failed", "the labels are", frame, "step-000100", "again", "in F", "launcher", "=" * 64)
    assert all(part in line for part, line in zip(parts, _essentials(shown)[1:], strict=True))
