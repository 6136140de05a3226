"""Commits: copies of the state in memory, to go back to; as often as they cost next to nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

from hvdtrain.state.snapshot import Snapshot
from hvdtrain.state.train_state import StateDict, TrainState

SHARE = 0.01
"""Of the time, that commits may take."""


class Interval:
    """When the next commit is due, by one rank's clock: pure.

    As soon as commits then take no more than `SHARE` of the time; earlier where more than `loss_s` would be lost
    otherwise, whatever it costs.

    Args:
        loss_s: seconds of training that may be lost.
    """

    def __init__(self, loss_s: float) -> None:
        self._loss_s = loss_s
        self._at_s = 0.0
        self._cost_s = 0.0

    def took(self, at_s: float, cost_s: float) -> None:
        """A commit was taken at `at_s`, in `cost_s` seconds."""
        self._at_s, self._cost_s = at_s, cost_s

    def due(self, now_s: float, step_s: float) -> bool:
        """Whether the step that comes, and takes about `step_s` seconds, is to end with a commit."""
        since_s = now_s - self._at_s
        return since_s + step_s >= self._cost_s / SHARE or since_s + 2 * step_s >= self._loss_s


class Commits:
    """The newest commit of a rank.

    Args:
        loss_s: seconds of training that may be lost.
        clock: seconds.
    """

    def __init__(self, loss_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._interval = Interval(loss_s)
        self._clock = clock
        self._asked_s = clock()
        self._snapshot = Snapshot()

    @property
    def step(self) -> int:
        """Optimizer steps done when it was taken; -1 before."""
        return self._snapshot.step

    def due(self) -> bool:
        """Whether the step that comes is to end with a commit, by this rank's clock; asked before each step.

        One rank's answer has to go for all: through the numbers that a step sums over ranks.
        """
        before_s, self._asked_s = self._asked_s, self._clock()
        return self.step < 0 or self._interval.due(self._asked_s, self._asked_s - before_s)

    def take(self, state: TrainState, *, settled: bool = False) -> None:
        """Copy the state, with the exchange's state equal on all ranks. Collective: yes, unless `settled`.

        The state stays as it is: when commits are taken depends on clocks, and what is trained must not.

        Args:
            state: of this rank.
            settled: its exchange was made equal on all ranks before.
        """
        began_s = self._clock()
        taken = state.state_dict()
        if not settled and state.exchange is not None and (carried := state.exchange.synchronized_state()):
            taken = StateDict({**taken.tensors, "exchange": carried}, taken.values)
        self._snapshot.take(taken, state.progress.step)
        now_s = self._clock()
        self._interval.took(now_s, now_s - began_s)

    def restore(self, state: TrainState) -> None:
        """Make the state what it was."""
        taken = self._snapshot.state
        # What compression carries on is not copied by who takes it over, and the next commit is taken into this memory.
        carried = {name: tensor.clone() for name, tensor in taken.tensors.get("exchange", {}).items()}
        state.load_state_dict(StateDict({**taken.tensors, **({"exchange": carried} if carried else {})}, taken.values))
