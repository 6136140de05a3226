"""Signals are held back, also while an error is reported, and delivered afterwards."""

from __future__ import annotations

import os
import signal

import pytest

from hvdtrain.training.loop.step_sums import SAVE, TERMINATE, PendingSignals, handlers_as_before

HELD = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


def _handlers() -> list[object]:
    return [signal.getsignal(number) for number in HELD]


@pytest.mark.parametrize("stop_on_usr1", [False, True])
def test_signals_are_kept_until_they_are_handled(stop_on_usr1: bool) -> None:
    """In a job that submits itself again, the notice stops it."""
    before = _handlers()
    with PendingSignals(stop_on_usr1=stop_on_usr1) as signals:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        taken = signals.pop()
        assert (taken[SAVE], taken[TERMINATE]) == ((0, 3) if stop_on_usr1 else (2, 1))
        assert not any(signals.pop())
    assert _handlers() == before


def test_a_second_interrupt_interrupts() -> None:
    with handlers_as_before(), pytest.raises(KeyboardInterrupt), PendingSignals():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_rank_that_tells_of_an_error_is_not_ended_by_the_launcher_meanwhile() -> None:
    before = _handlers()
    with pytest.raises(ValueError, match="no"), handlers_as_before():
        try:
            with PendingSignals():
                raise ValueError("no")
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
    assert _handlers() == before
