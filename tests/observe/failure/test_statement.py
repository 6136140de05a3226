"""What a rank says of itself: from an error, from another thread while it works or waits. How ranks are called."""

from __future__ import annotations

import threading
import types

import pytest
from msgspec.structs import replace

from hvdtrain.observe.failure import statement as module
from hvdtrain.observe.failure.statement import CURRENT, STALLED, TRAINING, Statement, StatementMaker, this_process
from hvdtrain.spans import Spans
from tests.observe.failure.test_verdict import busy, failed, waiting, who
from tests.support.launch import TIMEOUT_S


def _waits(release: threading.Event) -> None:
    release.wait()


@pytest.mark.parametrize("module", ["hvdtrain.comm.horovod", "elsewhere"])
def test_another_thread_sees_where_the_training_thread_is_and_whether_it_waits_for_others(module: str) -> None:
    spans, flight, release, ready = Spans(), {"gradients/0": 0.0}, threading.Event(), threading.Event()
    makers: list[StatementMaker] = []
    blocked = types.FunctionType(_waits.__code__, {"__name__": module})

    def train() -> None:
        makers.append(StatementMaker(this_process(1, "a"), spans, flight))
        spans.step = 7
        with spans("wait"):
            ready.set()
            blocked(release)

    thread = threading.Thread(target=train)
    thread.start()
    assert ready.wait(TIMEOUT_S)
    try:
        statement = makers[0].current(STALLED)
        while "release.wait()" not in "".join(statement.stacks[TRAINING]):
            statement = makers[0].current(STALLED)
    finally:
        release.set()
        thread.join()
    assert (statement.kind, statement.step, statement.process.rank) == (STALLED, 7, 1)
    assert statement.is_waiting == (module == "hvdtrain.comm.horovod")
    assert statement.open_spans[0][0] == "wait" and list(statement.in_flight) == ["gradients/0"]
    assert statement.memory["rss"] > 0
    assert "".join(statement.stacks[TRAINING]).count("blocked(release)") == 1


def test_a_failed_rank_says_what_it_was_in() -> None:
    spans = Spans()
    spans.step = 2
    with pytest.raises(ValueError, match="no") as caught, spans("forward"):
        raise ValueError("no")
    statement = StatementMaker(this_process(0, "a"), spans, {}).failure(caught.value)
    assert (statement.last_span, statement.open_spans, statement.step) == ("forward", [], 2)


def test_ranks_at_one_place_are_taken_together_unless_they_wait_for_different_collectives() -> None:
    statements = [busy(0), *(waiting(rank, "gradients/0", idle_s=3.0 + rank / 10) for rank in (1, 2, 3, 5))]
    (first, _), (others, longest) = module.grouped(statements)
    assert (first, others) == ("rank 0 on a", "ranks 1-3, 5 on a")
    assert module.place(longest) == "in wait at step 12 for 3.5 s, waiting for gradients/0"
    assert len(module.grouped([waiting(0, "gradients/0"), waiting(1, "gradients/1")])) == 2


def test_names() -> None:
    assert module.labels([who(2, "b"), who(1, "a")]) == "ranks 1-2"
    assert module.place(Statement(CURRENT, 0.0, who(0))) == "before the first step"
    assert module.place(replace(failed(0), last_span="forward")) == "at step 3, last in forward"
