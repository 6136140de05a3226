"""What a rank says of itself: from an error, from another thread while it works or waits."""

from __future__ import annotations

import threading
import types

import pytest
import torch

from hvdtrain.errors import DataError, NonFiniteError
from hvdtrain.observe.failure.statement import STALLED, TRAINING, Witness, fault, myself, out_of_memory
from hvdtrain.spans import Spans


class HorovodInternalError(RuntimeError):
    """Known by its name: only one module imports Horovod."""


def _raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


def test_an_error_by_its_parts() -> None:
    found = fault(_raised(DataError("what", expected="this", found="that")))
    assert (found.type, found.parts) == ("DataError", {"what": "what", "expected": "this", "found": "that"})
    assert not found.everywhere
    assert fault(_raised(NonFiniteError("inf"))).everywhere
    other = fault(_raised(ValueError("no")))
    assert (other.message, other.parts) == ("no", {})
    assert "test_statement.py" in other.traceback and other.traceback.endswith("ValueError: no\n")


def test_what_follows_from_another_ranks_end_is_a_consequence() -> None:
    assert fault(_raised(HorovodInternalError("shut down"))).consequence
    assert fault(_raised(ValueError("no"), HorovodInternalError("shut down"))).consequence
    assert not fault(_raised(RuntimeError("no"))).consequence


def test_a_traceback_without_end_is_cut() -> None:
    assert len(fault(_raised(ValueError("x" * 1_000_000))).traceback) < 30_000


@pytest.mark.parametrize(
    ("error", "ran_out"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("no"), False),
        (ValueError("out of memory is what this is not"), False),
    ],
)
def test_memory_that_ran_out_is_known(error: Exception, ran_out: bool) -> None:
    assert out_of_memory(error) == ran_out


def test_torchs_own_error_is_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    assert out_of_memory(caught.value)


def _waits(release: threading.Event) -> None:
    release.wait()


@pytest.mark.parametrize("module", ["hvdtrain.comm.horovod", "elsewhere"])
def test_another_thread_sees_where_the_training_thread_is_and_whether_it_waits_for_others(module: str) -> None:
    spans, flight, release, ready = Spans(), {"gradients/0": 0.0}, threading.Event(), threading.Event()
    witnesses: list[Witness] = []
    blocked = types.FunctionType(_waits.__code__, {"__name__": module})

    def train() -> None:
        witnesses.append(Witness(myself(1, "a"), spans, flight))
        spans.step = 7
        with spans("wait"):
            ready.set()
            blocked(release)

    thread = threading.Thread(target=train)
    thread.start()
    assert ready.wait(20)
    try:
        statement = witnesses[0].here(STALLED)
        while "release.wait()" not in "".join(statement.stacks[TRAINING]):
            statement = witnesses[0].here(STALLED)
    finally:
        release.set()
        thread.join()
    assert (statement.kind, statement.step, statement.who.rank) == (STALLED, 7, 1)
    assert statement.waits == (module == "hvdtrain.comm.horovod")
    assert [name for name, _ in statement.open] == ["wait"]
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
        statement = Witness(myself(0, "a"), spans, {}).failed(error)
    assert (statement.last, statement.open, statement.step) == ("forward", [], 2)
