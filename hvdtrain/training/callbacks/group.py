"""The callbacks of a run: those that options ask for, and all of them, called in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import allgather_json
from hvdtrain.config.schema import Config
from hvdtrain.errors import ConfigError
from hvdtrain.loading import load
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.state.checkpoint_store import Measure
from hvdtrain.state.divided import copy_of, local
from hvdtrain.training.callbacks.base import Callback, Training
from hvdtrain.training.loop.evaluate import Evaluation


class EarlyStopping(Callback):
    """Ends training after `patience` evaluations in a row that are not better than the best one before."""

    def __init__(self, patience: int, measure: Measure = Measure()) -> None:  # noqa: B008
        self._patience, self._measure = patience, measure
        self._best: float | None = None  # the score of the best evaluation; lower is better
        self._bad = 0  # evaluations since then
        self._at = -1  # step of the last evaluation; one that a lost rank interrupts is repeated

    def on_evaluation(self, training: Training, evaluation: Evaluation) -> None:  # noqa: D102
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

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: D102
        self._best, self._bad, self._at = state["best"], state["bad"], state["at"]


class EMA(Callback):
    """Keeps the average of the trained parameters, and adds its held-out loss to evaluations as ``ema_loss``.

    After step n, `decay` or (1 + n) / (10 + n), if that is less, of the average stays: otherwise the initial values
    would be most of a short run's average (TensorFlow's ExponentialMovingAverage, num_updates).

    `average`: by the name of the parameter, divided as it is.
    """

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self.average: dict[str, Tensor] = {}

    def on_begin(self, training: Training) -> None:
        """Start with the parameters, unless the run has an average."""
        self._pairs(training)

    def on_step(self, training: Training, record: Mapping[str, Any]) -> None:  # noqa: D102
        if record["skipped"]:
            return
        decay = min(self._decay, (1 + training.step) / (10 + training.step))
        averages, parameters = self._pairs(training)
        with torch.no_grad():
            get_ema_multi_avg_fn(decay)(averages, parameters, None)  # type: ignore[no-untyped-call]

    def on_evaluation(self, training: Training, evaluation: Evaluation) -> None:  # noqa: D102
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

    def state_dict(self) -> Mapping[str, Any]:  # noqa: D102
        return self.average

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: D102
        self.average = dict(state)


class Callbacks:
    """The callbacks of this process, and the request of any of them, on any rank, to stop.

    Attributes:
        by_name: by the name of the class.
        asked: why those of this rank ask to stop, until all ranks know.
        why: the agreed reason to stop; None to continue.
    """

    def __init__(self, members: Sequence[Callback]) -> None:
        self.by_name = {type(member).__name__: member for member in members}
        if len(self.by_name) < len(members):
            raise ConfigError(
                "two callbacks are of the same class: checkpoints could not distinguish their state",
                found=", ".join(type(member).__name__ for member in members),
            )
        self.asked: list[str] = []
        self.why: str | None = None
        self._training: Any = None  # a `Training`, from `begin` to `end_round`
        self._has_begun = False

    def begin(self, training: Training, comm: Comm) -> None:
        """Begin a round. Collective: yes. Errors: ConfigError: other ranks have other callbacks."""
        self._training, self._comm = training, comm
        names = allgather_json(comm, list(self.by_name), name="callbacks/names")
        if names.count(names[0]) < len(names):
            other = next(rank for rank, found in enumerate(names) if found != names[0])
            raise ConfigError(
                "the ranks have different callbacks",
                expected=f"on each rank those of rank 0: {', '.join(names[0]) or 'none'}",
                found=f"on rank {other}: {', '.join(names[other]) or 'none'}",
                next_step="pass the same callbacks on every rank; in their methods, training.rank tells which it is",
            )
        if not self._has_begun:
            for callback in self.by_name.values():
                callback.on_begin(training)
        self._has_begun = True
        self._agree()

    def end_round(self) -> None:
        """Release the round, because its engine has memory."""
        self._training = None

    def on_step(self, record: Mapping[str, Any]) -> None:
        """Call those that are due."""
        for callback in self.by_name.values():
            if record["step"] % callback.every == 0:
                callback.on_step(self._training, record)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Call each; any may ask to stop at this step. Collective: yes."""
        for callback in self.by_name.values():
            callback.on_evaluation(self._training, evaluation)
        self._agree()

    def on_checkpoint(self) -> None:
        """Call each."""
        for callback in self.by_name.values():
            callback.on_checkpoint(self._training)

    def on_end(self, reason: str) -> None:
        """Call each."""
        for callback in self.by_name.values():
            callback.on_end(self._training, reason)

    def values(self) -> list[int]:
        """Return 1 if one of this rank asks to stop; the next step sums it over ranks."""
        return [int(bool(self.asked))] if self.by_name else []

    def on_sums(self, step: int, sums: Sequence[int]) -> None:
        """Agree on a stop if one asks for it. Collective: yes."""
        if any(sums):
            self._agree()

    def _agree(self) -> None:
        if not self.by_name:
            return
        every = allgather_json(self._comm, self.asked, name="callbacks/stop")
        self.asked.clear()  # not before: a lost rank may end the exchange
        self.why = self.why or next((why for each in every for why in each), None)


def make_callbacks(config: Config, info: RankInfo, given: Sequence[Any], *, evaluates: bool) -> Callbacks:
    """Return the callbacks that options ask for, then those of the calling program.

    Errors: ConfigError: one cannot be found or is of the wrong type, or there are no held-out data to judge by.
    """
    best, train = Measure.parse(config.checkpoint.best), config.train
    if not evaluates and (train.patience is not None or best != Measure()):
        raise ConfigError(
            "training cannot be judged by evaluations: there are no held-out data",
            next_step="omit --train.patience and --checkpoint.best, or hold out data",
        )
    members: list[Callback] = [EMA(train.ema)] if train.ema is not None else []
    members += [EarlyStopping(train.patience, best)] if train.patience is not None else []
    wanted = "a class of hvdtrain.Callback, without arguments"
    for spec in [config.callbacks] if isinstance(config.callbacks, str) else config.callbacks:
        members.append(_checked(load(spec, ConfigError, wanted, info.folder)(), spec))
    return Callbacks([*members, *(_checked(value, type(value).__name__) for value in given)])


def _checked(value: Any, name: str) -> Callback:
    if isinstance(value, Callback) and isinstance(value.every, int) and value.every >= 1:
        return value
    raise ConfigError(
        f"{name} is no callback",
        expected="an object of a class of hvdtrain.Callback, with every = 1 or more",
        found=f"every = {value.every!r}" if isinstance(value, Callback) else type(value).__name__,
    )
