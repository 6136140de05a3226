"""Trainings in which a bit flips on a rank, in a pass that another rank repeats."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain import Task
from hvdtrain.training.callbacks.base import Callback
from tests.support.gallery import Recorded
from tests.support.thread_job import train_on_threads

PASSES = 2
"""Micro-batches of each rank."""
CHECKED = ("--train.reproducible=bits", "--train.verify_every=1")
Plan = Callable[[int], tuple[int, str]]
"""Returns for a step which rank is wrong in it, and in what."""


KINDS = ("gradient", "activation", "parameter")


def anywhere(size: int, kinds: Sequence[str] = KINDS) -> Plan:
    """Of `size` ranks one is wrong in each step, in one of `kinds`."""

    def plan(step: int) -> tuple[int, str]:
        chosen = random.Random(1000 + step)
        return chosen.randrange(size), chosen.choice(kinds)

    return plan


def flipped(value: Tensor, chosen: random.Random) -> Tensor:
    bits = value.detach().clone().view(torch.int32)
    bits.view(-1)[chosen.randrange(bits.numel())] ^= 1 << chosen.randrange(31)
    return bits.view(torch.float32)


class Fault:
    """Flips a bit on a rank in the pass of a step that another rank repeats."""

    def __init__(self, rank: int, plan: Plan, model: nn.Sequential) -> None:
        self.rank, self.plan = rank, plan
        self.step, self.passes = 1, 0
        layer = model[3]
        assert isinstance(layer, nn.Linear)
        layer.register_forward_pre_hook(self._count)
        layer.register_forward_hook(self._activation)
        layer.weight.register_hook(self._gradient)

    def is_now(self, kind: str) -> bool:
        """Before its own passes, a rank repeats one of another rank."""
        is_checked = self.passes == 1 + 1 + self.step % PASSES
        return is_checked and self.plan(self.step) == (self.rank, kind)

    def _count(self, layer: nn.Linear, given: Any) -> None:
        if layer.training and torch.is_grad_enabled():
            self.passes += 1
            if self.is_now("parameter"):
                layer.weight.data = flipped(layer.weight, random.Random(self.step))

    def _activation(self, layer: nn.Module, given: Any, output: Tensor) -> Tensor:
        if layer.training and self.is_now("activation"):
            return output + (flipped(output, random.Random(self.step)) - output).detach()
        return output

    def _gradient(self, gradient: Tensor) -> Tensor:
        return flipped(gradient, random.Random(self.step)) if self.is_now("gradient") else gradient


class Steps(Callback):
    """Resets the fault of each rank after a step; each rank is a thread."""

    own = threading.local()

    def on_step(self, *arguments: Any) -> None:
        self.own.fault.step += 1
        self.own.fault.passes = 0


def make_task(rank: int, plan: Plan, fault: type[Fault] = Fault) -> Task:
    torch.manual_seed(3)
    inner = (nn.Linear(6, 30), nn.LayerNorm(30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh())
    model, data = nn.Sequential(*inner, nn.Linear(30, 1)), torch.utils.data.TensorDataset(torch.randn(60, 6))
    Steps.own.fault = fault(rank, plan, model)

    def loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
        return (model(batch[0])[:, 0] - batch[0].sum(1)).square().sum(), len(batch[0])

    return Task(model, loss, data, data, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))


def train_flipped(
    folder: Path,
    *options: str,
    size: int,
    steps: int = 6,
    plan: Plan = lambda step: (-1, ""),
    fault: type[Fault] = Fault,
) -> Recorded:
    given = ("--observe.timeline=off", "--observe.tensorboard=false", "--checkpoint.every=0", "--train.micro_batch=2")
    given += (
        f"--train.global_batch={2 * PASSES * size}",
        f"--train.steps={steps}",
        f"--run_dir={folder / 'run'}",
        *options,
    )
    train_on_threads(*given, size=size, build=partial(make_task, plan=plan, fault=fault), callbacks=[Steps()])
    return Recorded(folder, 0, "", "")
