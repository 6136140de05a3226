"""A step whose loss or gradient was not finite, done again under observation: who made it, of which samples."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from hvdtrain.comm.objects import allgather_json
from hvdtrain.data.loader import Stream, fetch_step, seed_forward
from hvdtrain.data.order import MicroBatch
from hvdtrain.training.diagnostics.backward_trace import BackwardTrace
from hvdtrain.training.diagnostics.forward_trace import ForwardTrace
from hvdtrain.training.diagnostics.origin import Origin, not_finite
from hvdtrain.training.loop.side_pass import untouched
from hvdtrain.training.loop.step import Stepper, checked_loss, to_device

_MOST_ALONE = 32
"""Samples of a micro-batch that are tried one by one."""


@dataclass(frozen=True)
class Finding:
    """Where a step went wrong.

    Attributes:
        origin: what made it.
        rank: whose micro-batch it was.
        positions: of the micro-batch: its first, and one behind its last.
        samples: positions of the samples that do it alone; all of the micro-batch where none was told apart.
        indices: theirs in the data set.
    """

    origin: Origin
    rank: int
    positions: list[int]
    samples: list[int]
    indices: list[int]

    def __str__(self) -> str:
        """One line."""
        return (
            f"{self.origin} (rank {self.rank}, sample(s) at position {_some(self.samples)}, index"
            f" {_some(self.indices)} of the data set)"
        )

    def facts(self) -> dict[str, Any]:
        """All of it as one level of plain values."""
        return {**asdict(self.origin), **{k: v for k, v in vars(self).items() if k != "origin"}}


@dataclass(frozen=True)
class Replayed:
    """What all ranks found, equal on all of them.

    Attributes:
        findings: the first of each rank that has one, in order of position.
        failures: why a rank's replay ended before its end, by rank.
    """

    findings: list[Finding]
    failures: dict[int, str]


def replay(stepper: Stepper, stream: Stream, position: int, scale: float) -> Replayed:
    """Do the step that starts at `position` again, changing nothing. Collective: yes.

    Each rank takes its own micro-batches, fetched anew, forward and backward, and stops at the first that is at fault.
    Only then do the ranks speak. A replay that raises is no failure of the run.

    Args:
        stepper: of the training.
        stream: of the training.
        position: of the step's first sample.
        scale: the loss scale of the step.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # detect_anomaly's own, and what the first pass has said already
            found = _own(stepper, stream, position, scale)
        mine: dict[str, Any] = {"finding": None if found is None else asdict(found)}
    except Exception as error:
        mine = {"failure": f"{type(error).__name__}: {error}"[:500]}
    ranks = allgather_json(stepper.comm, mine, name="replay")
    found_by_rank = [answer["finding"] for answer in ranks if answer.get("finding")]
    return Replayed(
        [Finding(**{**facts, "origin": Origin(**facts["origin"])}) for facts in found_by_rank],
        {rank: answer["failure"] for rank, answer in enumerate(ranks) if "failure" in answer},
    )


def _own(stepper: Stepper, stream: Stream, position: int, scale: float) -> Finding | None:
    collate = stepper.task.collate or default_collate
    with untouched(stepper.model, stepper.engine, stepper.device):
        origin: Origin | None = None
        for where, indices, samples in fetch_step(stream, position):
            rerun = _Rerun(stepper, partial(seed_forward, stream.seed, where.start), scale)
            origin = rerun.origin(to_device(collate(samples), stepper.device))
            if origin is not None:
                guilty = list(range(len(samples)))
                if 1 < len(samples) <= _MOST_ALONE and origin.kind != "parameter":
                    guilty = rerun.alone(samples, collate) or guilty
                return _finding(origin, stream.rank, where, indices, guilty)
        origin = _too_large(stepper.model, scale)
        return None if origin is None else _finding(origin, stream.rank, where, indices, list(range(len(indices))))


def _finding(origin: Origin, rank: int, where: MicroBatch, indices: list[int], guilty: list[int]) -> Finding:
    samples = [where.start + g for g in guilty]
    return Finding(origin, rank, [where.start, where.stop], samples, [indices[g] for g in guilty])


@dataclass
class _Rerun:
    """A micro-batch's passes once more; gradients add up in `parameter.grad` as they did in the step.

    Attributes:
        stepper: of the training.
        seed: seeds the forward pass.
        scale: on the loss.
    """

    stepper: Stepper
    seed: Callable[[], None]
    scale: float

    def origin(self, batch: Any) -> Origin | None:
        """What made loss or gradient not finite; None where both are."""
        model = self.stepper.model
        with torch.autograd.detect_anomaly(check_nan=False):  # so that each node knows its line of the forward pass
            with ForwardTrace(model, batch) as forward:
                loss = self._loss(batch)
            if not_finite(loss):
                return forward.origin(loss)
            with BackwardTrace(loss, forward.module_of) as backward:
                self._backward(loss)
        bad = _bad(model)
        if not bad:
            return None
        origin = backward.origin(model, bad)
        if self.scale == 1.0:
            return origin
        self._clear()
        return replace(self, scale=1.0).origin(batch) or replace(origin, kind="overflow")

    def alone(self, samples: list[Any], collate: Callable[[list[Any]], Any]) -> list[int]:
        """Which samples make loss or gradient not finite by themselves; none where that cannot be tried."""
        for copies in (1, 2):  # batch norm wants two
            with suppress(Exception):
                return [i for i, sample in enumerate(samples) if self._is_bad(collate([sample] * copies))]
        return []

    def _is_bad(self, batch: Any) -> bool:
        self._clear()
        loss = self._loss(to_device(batch, self.stepper.device))
        if not_finite(loss):
            return True
        self._backward(loss)
        return bool(_bad(self.stepper.model))

    def _backward(self, loss: Tensor) -> None:
        torch.autograd.backward(loss * (self.scale / (self.stepper.global_batch * self.stepper.task.nominal_weight)))

    def _clear(self) -> None:
        for parameter in self.stepper.model.parameters():
            parameter.grad = None

    def _loss(self, batch: Any) -> Tensor:
        self.seed()
        with self.stepper.precision.autocast():
            return checked_loss(self.stepper.task, self.stepper.model, batch)[0]


def _bad(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.grad is not None and not_finite(p.grad)]


def _too_large(model: nn.Module, scale: float) -> Origin | None:
    """Of gradients that are finite, but whose norm is not: squares of 1e20 are beyond fp32."""
    gradients = {name: p.grad / scale for name, p in model.named_parameters() if p.grad is not None}
    if not gradients or not not_finite(nn.utils.get_total_norm(gradients.values())):
        return None
    name = max(gradients, key=lambda n: float(gradients[n].abs().max()) if gradients[n].numel() else 0.0)
    module = name.rpartition(".")[0]
    kind = type(model.get_submodule(module)).__name__
    return Origin("overflow", module, kind, f"the norm over all, most of it that of {name}", None, name)


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:4])) + (f" and {len(numbers) - 4} more" if len(numbers) > 4 else "")
