"""What does the trainer cost over a hand-written loop with the same losses?

One process of 1 thread; steps of about 1, 10 and 100 ms. Ours and the loop take turns, each first in half of them;
their losses must be equal. The exchange of many small gradients is timed alone: its Python work.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from common import Figure, figure, main, ratios
from torch import nn

import hvdtrain
from hvdtrain.comm.solo import SoloComm
from hvdtrain.config.parse import parse_object
from hvdtrain.data.order import sample_indices
from hvdtrain.exchange.buckets import assign_buckets
from hvdtrain.exchange.reducer import Reducer
from hvdtrain.observe.past_journal import read_steps
from hvdtrain.training.start.optimizers import lr_schedule, make_optimizer

BATCH, WARM_UP = 8, 5
LAYERS = {"1ms": (384, 4), "10ms": (1024, 7), "100ms": (1920, 18)}
STEPS = {"1ms": 400, "10ms": 100, "100ms": 20}


def task(width: int, depth: int) -> hvdtrain.Task:
    """A stack of linear layers on random data."""
    torch.manual_seed(0)
    x = torch.randn(512, width)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    data = torch.utils.data.TensorDataset(x, x.roll(1, 1))
    return hvdtrain.Task(nn.Sequential(*layers), lambda m, b: (((m(b[0]) - b[1]) ** 2).mean(1).sum(), len(b[0])), data)


def options(steps: int, run: Path) -> dict[str, object]:
    """What is trained, by both."""
    return {
        "run_dir": str(run),
        # Clipped in every step, so that both scale: ours leaves gradients alone where there is nothing to do.
        "train": {"steps": steps, "global_batch": BATCH, "micro_batch": BATCH, "clip": 1e-3},
        "checkpoint": {"every": 0},
        "optimizer": {"lr": 1e-4},  # low, so that rounding stays rounding
    }


def ours(name: str, steps: int, folder: Path) -> tuple[float, list[float]]:
    """Seconds a step, from the end of one to the end of the next, and the losses."""
    hvdtrain.train(options(steps, folder), task(*LAYERS[name]))
    lines = list(read_steps(folder / "journal.jsonl").values())
    times = np.diff([line["time"] for line in lines])
    return statistics.median(times[WARM_UP:]), [line["loss"] for line in lines]


def by_hand(name: str, steps: int) -> tuple[float, list[float]]:
    """The same by a loop as anyone would write it."""
    config = parse_object(options(steps, Path("unused")), None).config
    made = task(*LAYERS[name])
    model, optimizer = made.model, make_optimizer(made.model, config.optimizer)
    lr_factor = lr_schedule(config.optimizer, steps)
    order = sample_indices(np.arange(steps * BATCH), len(made.train_data), config.seed).reshape(steps, BATCH).tolist()
    losses, ends = [], []
    for step, batch in enumerate(torch.utils.data.DataLoader(made.train_data, batch_sampler=order)):
        for group in optimizer.param_groups:
            group["lr"] = config.optimizer.peak_lr * lr_factor(step)
        optimizer.zero_grad()
        loss, weight = made.loss(model, batch)
        (loss / weight).backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.train.clip)
        optimizer.step()
        losses.append(loss.item() / weight)
        ends.append(time.time())
    return statistics.median(np.diff(ends)[WARM_UP:]), losses


def exchange(steps: int) -> tuple[list[float], list[float]]:
    """Milliseconds of an exchange of 300 gradients in 100 buckets, without any transfer: in backward, and outside."""
    parameters = [nn.Parameter(torch.zeros(4)) for _ in range(300)]
    named = [(str(number), parameter) for number, parameter in enumerate(parameters)]
    comm = SoloComm()
    comm.size = 2
    inside, outside = [], []
    for exchanged in (False, True):
        reducer = None
        if exchanged:
            reducer = Reducer(lambda: named, comm, bucket_bytes=48)
            reducer.load_state_dict({}, {"plan": asdict(assign_buckets(named, 48)), "ranks": 2})
            assert reducer.exchange is not None and len(reducer.exchange.plan.buckets) == 100
        for step in range(steps):
            for parameter in parameters:
                parameter.grad = None
            loss = torch.cat(parameters).sum()
            times = [time.perf_counter()]
            if reducer is not None:
                reducer.begin()
                reducer.collect()
            times.append(time.perf_counter())
            loss.backward()
            times.append(time.perf_counter())
            if reducer is not None:
                reducer.finish()
                reducer.commit(applied=True)
            times.append(time.perf_counter())
            begin, backward, finish = np.diff(times) * 1e3
            if reducer is None:
                inside.append(-backward)
            else:
                inside[step] += backward
                outside.append(begin + finish)
    return inside, outside


def measure(quick: bool) -> list[Figure]:
    torch.set_num_threads(1)
    inside, outside = exchange(100 if quick else 400)
    figures = [
        figure("overhead/exchange_in_backward_ms", inside, "ms"),
        figure("overhead/exchange_outside_ms", outside, "ms"),
    ]
    for name in LAYERS:
        by_hand(name, STEPS[name])  # the first in a size is slower, whichever it is
        mine, theirs = [], []
        for number in range(4 if quick else 16):
            if number % 2:
                theirs.append(by_hand(name, STEPS[name]))
            with tempfile.TemporaryDirectory() as folder:
                mine.append(ours(name, STEPS[name], Path(folder)))
            if number % 2 == 0:
                theirs.append(by_hand(name, STEPS[name]))
            np.testing.assert_allclose(mine[-1][1], theirs[-1][1], rtol=1e-5)
        mine, theirs = [seconds for seconds, _ in mine], [seconds for seconds, _ in theirs]
        figures.append(figure(f"overhead/{name}", ratios(mine, theirs), "ratio"))
        figures.append(figure(f"overhead/{name}_loop_ms", [1e3 * s for s in theirs], "ms"))
        if name == "1ms":
            extra = [1e6 * (a - b) for a, b in zip(mine, theirs, strict=True)]
            figures.append(figure("overhead/us", extra, "us a step"))
    return figures


if __name__ == "__main__":
    main(__doc__, measure)
