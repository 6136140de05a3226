"""Commits: copies of the state in memory to roll back to, as often as their cost is negligible."""

from __future__ import annotations

import time
from collections.abc import Callable

from hvdtrain.state.snapshot import Snapshot
from hvdtrain.state.train_state import StateDict, TrainState

MAX_COST = 0.01
"""Largest fraction of the time to spend on commits."""


def is_commit_due(since_s: float, step_s: float, cost_s: float, loss_s: float) -> bool:
    """Return whether the next step, which takes about `step_s` seconds, should end with a commit. Pure.

    It should when commits take at most `MAX_COST` of the time, or if more than `loss_s` could be lost otherwise. The
    last commit was `since_s` seconds ago and took `cost_s`.
    """
    return since_s + step_s >= cost_s / MAX_COST or since_s + 2 * step_s >= loss_s


class Commits:
    """The newest commit of a rank. At most about `loss_s` seconds of training may be lost."""

    def __init__(self, loss_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._loss_s = loss_s
        self._clock = clock
        self._asked_s = clock()
        self._at_s = self._cost_s = 0.0
        self._snapshot = Snapshot()

    @property
    def step(self) -> int:
        """Optimizer steps done at the commit; -1 before the first."""
        return self._snapshot.step

    def due(self) -> bool:
        """Return whether the next step should end with a commit, by this rank's clock. Call it before each step.

        All ranks must follow one rank's answer, which travels with the numbers that a step sums over ranks.
        """
        before_s, self._asked_s = self._asked_s, self._clock()
        since_s, step_s = self._asked_s - self._at_s, self._asked_s - before_s
        return self.step < 0 or is_commit_due(since_s, step_s, self._cost_s, self._loss_s)

    def commit(self, state: TrainState, *, synchronized: bool = False) -> None:
        """Copy the state, with exchange state equal on all ranks. Collective: yes, unless it is equal, `synchronized`.

        It does not change the state: the time of a commit depends on clocks, but training must not.
        """
        began_s = self._clock()
        copied = state.state_dict()
        if not synchronized and state.exchange is not None and (exchange := state.exchange.synchronized_state()):
            copied = StateDict({**copied.tensors, "exchange": exchange}, copied.values)
        self._snapshot.capture(copied, state.progress.step)
        self._at_s = self._clock()
        self._cost_s = self._at_s - began_s

    def restore(self, state: TrainState) -> None:
        """Load the newest commit into `state`."""
        saved = self._snapshot.state
        # The exchange keeps these tensors without a copy, and the next commit overwrites the buffer.
        exchange = {name: tensor.clone() for name, tensor in saved.tensors.get("exchange", {}).items()}
        state.load_state_dict(
            StateDict({**saved.tensors, **({"exchange": exchange} if exchange else {})}, saved.values)
        )
