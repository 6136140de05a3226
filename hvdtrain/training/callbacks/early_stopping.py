"""End training that does not improve any more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hvdtrain.state.measure import Measure
from hvdtrain.training.callbacks.base import Callback, Training

if TYPE_CHECKING:
    from hvdtrain.training.loop.evaluate import Evaluation


class EarlyStopping(Callback):
    """Ends training after `patience` evaluations in a row that are not better than the best one before."""

    def __init__(self, patience: int, measure: Measure = Measure()) -> None:  # noqa: B008
        self._patience, self._measure = patience, measure
        self._best: float | None = None  # the score of the best evaluation; lower is better
        self._bad = 0  # evaluations since then
        self._at = -1  # step of the last evaluation; one that a lost rank interrupts is repeated

    def on_evaluation(self, training: Training, evaluation: Evaluation) -> None:
        """Compare with the best."""
        score = self._measure.score(evaluation.loss, evaluation.metrics)
        is_new, self._at = training.step != self._at, training.step
        if score is not None and (self._best is None or score < self._best):
            self._best, self._bad = score, 0
        else:
            self._bad += is_new
        self.on_begin(training)

    def on_begin(self, training: Training) -> None:
        """Stop at once if a resumed run has ended so before."""
        if self._bad >= self._patience:
            training.stop(f"{self._measure.name} has not improved in {self._bad} evaluations (--train.patience)")

    def state_dict(self) -> Mapping[str, Any]:
        """Return the best score, the number of evaluations since then, and the step of the last one."""
        return {"best": self._best, "bad": self._bad, "at": self._at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue to compare."""
        self._best, self._bad, self._at = state["best"], state["bad"], state["at"]
