"""Replay a step with a non-finite loss or gradient, to find the operation and the samples that caused it."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from hvdtrain.comm.objects import allgather_json
from hvdtrain.data.loader import Stream, fetch_step, seed_forward
from hvdtrain.engine.base import Engine
from hvdtrain.errors import listed
from hvdtrain.exchange.norms import norm, squared_norm
from hvdtrain.training.diagnostics.origin import BackwardTrace, ForwardTrace, Origin, not_finite
from hvdtrain.training.loop.buffers import all_buffers, copy_to_host
from hvdtrain.training.loop.forward import checked_loss, to_device
from hvdtrain.training.loop.step import Stepper

_MOST_ALONE = 32  # largest micro-batch with samples that are tried one by one


@dataclass(frozen=True)
class Finding:
    """The cause of a non-finite step."""

    origin: Origin  # the operation
    rank: int  # that had the micro-batch
    positions: list[int]  # range [begin, end) of the micro-batch
    samples: list[int]  # positions of the samples that fail by themselves; all of the micro-batch if none does
    indices: list[int]  # of these samples in the data set

    def __str__(self) -> str:
        return (
            f"{self.origin} (rank {self.rank}, sample(s) at position {listed(self.samples, 4)}, index"
            f" {listed(self.indices, 4)} of the data set)"
        )

    def facts(self) -> dict[str, Any]:
        """Return all of it as a flat dict of plain values."""
        return {**asdict(self.origin), **{k: v for k, v in vars(self).items() if k != "origin"}}


def replay(stepper: Stepper, stream: Stream, position: int, scale: float) -> tuple[list[Finding], dict[int, str]]:
    """Repeat the step that starts at `position` under the loss scale `scale`; change nothing. Collective: yes.

    Each rank fetches its micro-batches again, runs forward and backward, and stops at the first non-finite one. There
    is no collective before that. An error in a replay is not an error of the run.

    Returns the first finding of each rank that has one, and the errors of the replay by rank; equal on all ranks.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of detect_anomaly, and those of the first pass again
            found = _own(stepper, stream, position, scale)
        mine: dict[str, Any] = {"finding": None if found is None else asdict(found)}
    except Exception as error:
        mine = {"failure": f"{type(error).__name__}: {error}"[:500]}
    ranks = allgather_json(stepper.comm, mine, name="replay")
    found_by_rank = [answer["finding"] for answer in ranks if answer.get("finding")]
    findings = [Finding(**{**facts, "origin": Origin(**facts["origin"])}) for facts in found_by_rank]
    return findings, {rank: answer["failure"] for rank, answer in enumerate(ranks) if "failure" in answer}


def _own(stepper: Stepper, stream: Stream, position: int, scale: float) -> Finding | None:
    collate = stepper.task.collate or default_collate
    with preserved_state(stepper.model, stepper.engine, stepper.device):
        for where, indices, samples in fetch_step(stream, position):
            suspects = list(zip(range(where.start, where.stop), indices, strict=True))
            rerun = _Rerun(stepper, partial(seed_forward, stream.seed, where.start), scale)
            origin = rerun.origin(to_device(collate(samples), stepper.device))
            if origin is not None:
                if 1 < len(samples) <= _MOST_ALONE and origin.kind != "parameter":
                    suspects = [suspects[i] for i in rerun.alone(samples, collate)] or suspects
                break
        else:
            origin = _too_large(stepper.model, scale)
    if origin is None:
        return None
    if origin.module is not None:
        origin = replace(origin, module_type=type(dict(stepper.model.named_modules())[origin.module]).__name__)
    positions, chosen = [position for position, _ in suspects], [index for _, index in suspects]
    return Finding(origin, stream.rank, [where.start, where.stop], positions, chosen)


@dataclass
class _Rerun:
    """Repeats the passes of a micro-batch; gradients add up in `parameter.grad` as in the step."""

    stepper: Stepper
    seed: Callable[[], None]
    scale: float

    def origin(self, batch: Any) -> Origin | None:
        """Return what made the loss or the gradient non-finite; None if both are finite."""
        model, precision = self.stepper.model, self.stepper.precision
        # Anomaly detection gives each node its source line.
        with torch.autograd.detect_anomaly(check_nan=False), precision.weights():
            with ForwardTrace(model, batch) as forward:
                loss = self._loss(batch)
            if not_finite(loss):
                return forward.origin(loss)
            with BackwardTrace(loss, forward.module_of) as backward:
                self._backward(loss)
        bad = _bad(model)
        if not bad:
            return None
        origin = backward.origin(bad)
        if self.scale == 1.0:
            return origin
        self.stepper.model.zero_grad()
        return replace(self, scale=1.0).origin(batch) or replace(origin, kind="overflow")

    def alone(self, samples: list[Any], collate: Callable[[list[Any]], Any]) -> list[int]:
        """Return the samples that make loss or gradient non-finite by themselves; none if this cannot be tried."""
        for copies in (1, 2):  # batch norm needs two
            with suppress(Exception):
                return [i for i, sample in enumerate(samples) if self._is_bad(collate([sample] * copies))]
        return []

    def _is_bad(self, batch: Any) -> bool:
        self.stepper.model.zero_grad()
        with self.stepper.precision.weights():
            loss = self._loss(to_device(batch, self.stepper.device))
            if not_finite(loss):
                return True
            self._backward(loss)
        return bool(_bad(self.stepper.model))

    def _backward(self, loss: Tensor) -> None:
        torch.autograd.backward(loss * (self.scale / self.stepper.nominal))

    def _loss(self, batch: Any) -> Tensor:
        self.seed()
        with self.stepper.precision.autocast():
            return checked_loss(self.stepper.task, self.stepper.model, batch)[0]


def _bad(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.grad is not None and not_finite(p.grad)}


def _too_large(model: nn.Module, scale: float) -> Origin | None:
    """Return the origin of a non-finite norm of finite gradients: squares of 1e20 overflow fp32."""
    gradients = {name: p.grad / scale for name, p in model.named_parameters() if p.grad is not None}
    if not gradients or not not_finite(norm(squared_norm([*gradients.values()]))):
        return None
    name = max(gradients, key=lambda n: float(gradients[n].abs().max()) if gradients[n].numel() else 0.0)
    function = f"the norm of all gradients, mostly that of {name}"
    return Origin("overflow", name.rpartition(".")[0], function=function, tensor=name)


@contextmanager
def preserved_state(model: nn.Module, engine: Engine, device: torch.device) -> Iterator[None]:
    """Restore buffers, modes, random states and gradients at the end, bit for bit. Used between two steps.

    Anything else that a forward pass writes (parameters, attributes of the user's classes) is not restored.
    """
    modes = {module: module.training for module in model.modules()}
    buffers = copy_to_host(all_buffers(model))
    python, numpy = random.getstate(), np.random.get_state()
    engine.begin(0)  # clears gradients, as the next step does, and keeps backward from starting an exchange
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]  # of those the optimizer lacks
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        # Compiled models run eagerly: hooks would make them compile again, and would not see inside.
        eager: Any = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
        with torch.random.fork_rng([device] if device.type == "cuda" else []), eager:
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for copy in buffers:
            copy.restore()
        random.setstate(python)
        np.random.set_state(numpy)
        for module, training in modes.items():
            module.training = training
