"""What a rank says of itself: from an error, from another thread while it works or waits."""

from __future__ import annotations

import threading
import types

import pytest

from hvdtrain.observe.failure.statement import STALLED, TRAINING, StatementMaker, this_process
from hvdtrain.spans import Spans
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
    assert [name for name, _ in statement.open_spans] == ["wait"]
    assert list(statement.in_flight) == ["gradients/0"]
    assert statement.memory["rss"] > 0
    assert "".join(statement.stacks[TRAINING]).count("blocked(release)") == 1


def test_a_failed_rank_says_what_it_was_in() -> None:
    spans = Spans()
    spans.step = 2
    try:
        with spans("forward"):
            raise ValueError("no")
    except ValueError as error:
        statement = StatementMaker(this_process(0, "a"), spans, {}).failure(error)
    assert (statement.last_span, statement.open_spans, statement.step) == ("forward", [], 2)
