"""What a step of the trainer costs over a loop by hand with the same losses: calls and operations, counted."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import hvdtrain
from hvdtrain.config.parse import parse_object
from hvdtrain.data.order import sample_indices
from hvdtrain.training.start.optimizers import lr_schedule, make_optimizer

BATCH = 8
TINY = (32, 8)
"""Width and number of layers of a model with steps of some 500 us."""
WARM_UP, STEPS = 24, 64
"""Steps before those that are counted, which some traces record; and steps to count, with what is done for a block."""
PACKAGE = str(Path(hvdtrain.__file__).parent)
ALIKE = {
    "Optimizer.profile_hook_step.<locals>.wrapper": "optimizer",
    "Optimizer.zero_grad": "zero_grad",
    "Module._wrapped_call_impl": "forward",
    "Tensor.backward": "backward",
    "backward": "backward",
    "_BaseDataLoaderIter.__next__": "loader",
}
"""What both loops call, by qualified name: its calls are those of neither, unless the package is called within."""


def task(width: int, depth: int) -> hvdtrain.Task:
    """A stack of linear layers on random data."""
    torch.manual_seed(0)
    x = torch.randn(512, width)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    data = torch.utils.data.TensorDataset(x, x.roll(1, 1))
    return hvdtrain.Task(nn.Sequential(*layers), lambda m, b: (((m(b[0]) - b[1]) ** 2).mean(1).sum(), len(b[0])), data)


def options(steps: int, run: Path, passes: int = 1) -> dict[str, Any]:
    """What is trained, by both."""
    return {
        "run_dir": str(run),
        # Clipped in every step, so that both scale: ours leaves gradients alone where there is nothing to do.
        "train": {"steps": steps, "global_batch": BATCH, "micro_batch": BATCH // passes, "clip": 1e-3},
        "checkpoint": {"every": 0},
        "optimizer": {"lr": 1e-4},  # low, so that rounding stays rounding
    }


def by_hand(made: hvdtrain.Task, asked: dict[str, Any]) -> Iterator[float]:
    """The same by a loop as anyone would write it; yield the loss of each step."""
    config = parse_object(asked, None).config
    steps, passes = config.train.steps, BATCH // asked["train"]["micro_batch"]
    model, optimizer = made.model, made.optimizer or make_optimizer(made.model, config.optimizer)
    rates = [group["lr"] for group in optimizer.param_groups]
    lr_factor = lr_schedule(config.optimizer, steps)
    order = sample_indices(np.arange(steps * BATCH), len(made.train_data), config.seed).reshape(steps * passes, -1)
    batches = iter(torch.utils.data.DataLoader(made.train_data, batch_sampler=order.tolist()))
    for step in range(steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * lr_factor(step)
        optimizer.zero_grad()
        total = 0.0
        for _ in range(passes):
            loss, _ = made.loss(model, next(batches))
            (loss / BATCH).backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), config.train.clip)
        optimizer.step()
        yield total / BATCH


class Operations(TorchDispatchMode):
    """Counts the operations of torch, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found["operations", str(function)] += 1
        return function(*args, **(kwargs or {}))

    begin, end = TorchDispatchMode.__enter__, lambda self: self.__exit__(None, None, None)


class Calls:
    """Counts the calls of this thread, by kind and cause: a file of the package, or what both loops call."""

    def __init__(self) -> None:
        self.found: Counter[tuple[str, str]] = Counter()
        self._causes: dict[Any, str] = {}

    def begin(self) -> None:
        sys.setprofile(self._on_event)

    def end(self) -> None:
        sys.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            kind = "python_calls" if event == "call" else "c_calls"
            self.found[kind, self._cause(frame)] += 1

    def _cause(self, frame: FrameType | None) -> str:
        while frame is not None:
            code = frame.f_code
            if (cause := self._causes.get(code)) is None:
                path = code.co_filename
                own = path[len(PACKAGE) + 1 :] if path.startswith(PACKAGE) else ""
                cause = self._causes[code] = own or ALIKE.get(getattr(code, "co_qualname", code.co_name), "")
            if cause:
                return cause
            frame = frame.f_back
        return "the loop"


@dataclass
class Window:
    """Counts between two calls of the loss function, some steps apart: so both loops count whole steps."""

    counts: Operations | Calls
    passes: int
    steps: int
    calls: int = field(default=0, init=False)

    def around(self, made: hvdtrain.Task) -> hvdtrain.Task:
        """The task, counted."""
        loss = made.loss

        def counted(model: nn.Module, batch: Any) -> Any:
            step, first = divmod(self.calls, self.passes)
            self.calls += 1
            if not first and step == WARM_UP:
                self.counts.begin()
            elif not first and step == WARM_UP + self.steps:
                self.counts.end()
            return loss(model, batch)

        return replace(made, loss=counted)

    def a_step(self) -> dict[tuple[str, str], float]:
        """What was counted, for a step."""
        assert self.calls > (WARM_UP + self.steps) * self.passes
        return {key: count / self.steps for key, count in self.counts.found.items()}


def more_than_by_hand(
    make: Callable[[], Operations | Calls],
    ours: hvdtrain.Task,
    theirs: hvdtrain.Task,
    folder: Path,
    passes: int = 1,
    steps: int = STEPS,
    **further: Any,
) -> dict[tuple[str, str], float]:
    """What a step of the trainer does more than one by hand, by kind and cause."""
    asked = {**options(WARM_UP + steps + 3, folder, passes), **further}
    trained, looped = Window(make(), passes, steps), Window(make(), passes, steps)
    hvdtrain.train(asked, trained.around(ours))
    for _ in by_hand(looped.around(theirs), asked):
        pass
    found, least = trained.a_step(), looped.a_step()
    return {key: more for key in found | least if (more := found.get(key, 0.0) - least.get(key, 0.0))}
