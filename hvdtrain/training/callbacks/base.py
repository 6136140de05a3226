"""The contract of callbacks, and what they see of training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from hvdtrain.comm.base import Comm
    from hvdtrain.engine.base import Engine
    from hvdtrain.state.train_state import TrainState
    from hvdtrain.training.loop.evaluate import Evaluation


@dataclass
class Training:
    """A training job, as callbacks see it on this rank.

    Attributes:
        evaluate: return the loss and the metrics of the model's present values over the held-out samples; None if there
            are none. Collective: yes. It calls no callback.
    """

    _state: TrainState
    _engine: Engine
    _comm: Comm
    _current: Any  # the `Round`, which has callbacks itself
    device: torch.device  # of the model
    evaluate: Callable[[], Evaluation | None]

    @property
    def model(self) -> nn.Module:
        """The model after the newest step: a divided update is completed. With engine fsdp, its rows of this rank."""
        self._engine.complete()
        return self._state.model

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer. Learning rates are set before each step."""
        return self._state.optimizer

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self._state.progress.step

    @property
    def steps(self) -> int:
        """Step at which training ends, unless something stops it earlier."""
        return int(self._current.stop)

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self._comm.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._comm.size

    def stop(self, why: str) -> None:
        """End training on all ranks, with an evaluation and a checkpoint. One rank's call is enough.

        Called in `on_begin` or `on_evaluation`, it ends at this step, else after the next one. `why` is shown, and
        written to the journal.
        """
        self._current.worker.callbacks.asked.append(why)

    def say(self, text: str) -> None:
        """Show a line. Only rank 0 does."""
        self._current.recorder.say(text)


class Callback:
    """Called during training, on every rank, at the same steps. Override what is needed.

    A method may use collectives of `hvdtrain.comm` or of torch only if every rank does. An error ends the run.

    Attributes:
        every: number of steps from one call of `on_step` to the next.
    """

    every: int = 1

    def on_begin(self, training: Training) -> None:
        """Act before the first step of this process, with the state of the run restored.

        In an elastic job the ranks may change later; `training` is always up to date.
        """

    def on_step(self, training: Training, record: Mapping[str, Any]) -> None:
        """Act after a step. `record` is its line of the journal; ``skipped`` if the update was not applied."""

    def on_evaluation(self, training: Training, evaluation: Evaluation) -> None:
        """Act after an evaluation, before it is recorded. Values may be added to `evaluation.metrics` on all ranks."""

    def on_checkpoint(self, training: Training) -> None:
        """Act before the state is copied for a checkpoint."""

    def on_end(self, training: Training, reason: str) -> None:
        """Act when training has ended: ``finished``, ``stop_at``, the name of a signal, or the reason of a callback."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return what checkpoints keep of this callback, equal on all ranks: tensors, and values that JSON supports.

        A tensor with the name of one of the model's parameters is divided as that one is.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from such a state: when a run resumes or rolls back, and when a rank joins.

        Tensors are copies, on the device of the parameter with their name, or on the CPU.
        """
