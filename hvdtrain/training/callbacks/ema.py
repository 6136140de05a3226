"""An exponential moving average of the parameters, evaluated in addition to them.

torch's `swa_utils.AveragedModel` makes a second model, which no engine divides. Its update is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from hvdtrain.state.divided import copy_of, local
from hvdtrain.training.callbacks.base import Callback, Training

if TYPE_CHECKING:
    from hvdtrain.training.loop.evaluate import Evaluation


class EMA(Callback):
    """Keeps the average of the trained parameters, and adds its held-out loss to evaluations as ``ema_loss``.

    After step n, `decay` or (1 + n) / (10 + n), if that is less, of the average stays: otherwise the initial values
    would be most of a short run's average (TensorFlow's ExponentialMovingAverage, num_updates).

    Attributes:
        average: by the name of the parameter, divided as it is.
    """

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self.average: dict[str, Tensor] = {}

    def on_begin(self, training: Training) -> None:
        """Start with the parameters, unless the run has an average."""
        self._pairs(training)

    def on_step(self, training: Training, record: Mapping[str, Any]) -> None:
        """Move the average."""
        if record["skipped"]:
            return
        decay = min(self._decay, (1 + training.step) / (10 + training.step))
        averages, parameters = self._pairs(training)
        with torch.no_grad():
            get_ema_multi_avg_fn(decay)(averages, parameters, None)  # type: ignore[no-untyped-call]

    def on_evaluation(self, training: Training, evaluation: Evaluation) -> None:
        """Evaluate the average."""
        with self.applied(training):
            found = training.evaluate()
        if found is not None:
            evaluation.metrics["ema_loss"] = found.loss

    @contextmanager
    def applied(self, training: Training) -> Iterator[None]:
        """Give the model the average, and its own values again at the end."""
        self._swap(training)
        try:
            yield
        finally:
            self._swap(training)

    def _swap(self, training: Training) -> None:
        with torch.no_grad():
            for average, parameter in zip(*self._pairs(training), strict=True):
                own = parameter.clone()
                parameter.copy_(average)
                average.copy_(own)

    def _pairs(self, training: Training) -> tuple[list[Tensor], list[Tensor]]:
        """Return the averages, and the parameters. One that is trained from now on begins with its value."""
        parameters = dict(training.model.named_parameters())
        for name, parameter in parameters.items():
            if parameter.requires_grad and name not in self.average:
                self.average[name] = copy_of(parameter)
        names = [name for name in parameters if name in self.average]
        return [local(self.average[name]) for name in names], [local(parameters[name]) for name in names]

    def state_dict(self) -> Mapping[str, Any]:
        """Return the average."""
        return self.average

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from an average."""
        self.average = dict(state)
