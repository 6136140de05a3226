"""What does the trainer cost over a hand-written loop with the same losses?

One process of 1 thread; steps of about 1, 10 and 100 ms. Ours and the loop take turns, each first in half of them;
their losses must be equal. What the trainer adds to a step of a tiny model is also counted, as calls and operations of
torch by cause, and timed by the CPU clock of the training thread: there both take turns of some steps within one run.
The exchange of many small gradients is timed alone: its Python work.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Figure, figure, main, ratios
from torch import nn

import hvdtrain
from hvdtrain.comm.solo import SoloComm
from hvdtrain.exchange.buckets import assign_buckets
from hvdtrain.exchange.reducer import Reducer
from hvdtrain.observe.past_journal import read_steps
from tests.support.step_costs import TINY, WARM_UP, Calls, Operations, by_hand, more_than_by_hand, options, task

LAYERS = {"1ms": (384, 4), "10ms": (1024, 7), "100ms": (1920, 18)}
STEPS = {"1ms": 400, "10ms": 100, "100ms": 20}
TURN = 16
PASSES = 4


def ours(name: str, steps: int, folder: Path) -> tuple[float, list[float]]:
    """Seconds a step, from the end of one to the end of the next, and the losses."""
    hvdtrain.train(options(steps, folder), task(*LAYERS[name]))
    lines = list(read_steps(folder / "journal.jsonl").values())
    times = np.diff([line["time"] for line in lines])
    return statistics.median(times[5:]), [line["loss"] for line in lines]


def loop(name: str, steps: int) -> tuple[float, list[float]]:
    """The same of the loop by hand."""
    losses, ends = [], []
    for loss in by_hand(task(*LAYERS[name]), options(steps, Path("unused"))):
        losses.append(loss)
        ends.append(time.time())
    return statistics.median(np.diff(ends)[5:]), losses


def more_us(folder: Path, passes: int, turns: int) -> tuple[list[float], list[float]]:
    """Microseconds of CPU that a step of ours takes more than one by hand, and of that one.

    Both take turns of some steps.
    """
    steps = WARM_UP + TURN * turns + 3
    asked = options(steps, folder, passes)
    made, hand = task(*TINY), by_hand(task(*TINY), {**asked, "run_dir": "unused"})
    more, by_loop = list[float](), list[float]()
    calls, began = 0, 0.0

    def loss(model: nn.Module, batch: Any) -> Any:
        nonlocal calls, began
        step, first = divmod(calls, passes)
        calls += 1
        if not first and step >= WARM_UP and (step - WARM_UP) % TURN == 0:
            middle = time.thread_time()
            for _ in range(TURN):
                next(hand, None)
            end = time.thread_time()
            more.append(1e6 * ((middle - began) - (end - middle)) / TURN)
            by_loop.append(1e6 * (end - middle) / TURN)
            began = time.thread_time()
        return made.loss(model, batch)

    hvdtrain.train(asked, replace(made, loss=loss))
    return more[1:], by_loop[1:]


def counts() -> list[Figure]:
    """What the trainer does in a step more than the loop by hand; of each cause, for a reader."""
    figures = []
    for kind, make in (("operations", Operations), ("calls", Calls)):
        found = []
        for passes in (1, PASSES):
            with tempfile.TemporaryDirectory() as folder:
                found.append(more_than_by_hand(make, task(*TINY), task(*TINY), Path(folder), passes))
        for (sort, cause), count in sorted(found[0].items(), key=lambda item: -abs(item[1])):
            if abs(count) >= 1:
                print(f"{count:>8.1f} {sort:<12} {cause}")
        for sort in dict.fromkeys(sort for sort, _ in found[0]):
            one, more = (sum(count for (each, _), count in of.items() if each == sort) for of in found)
            figures.append(figure(f"overhead/{sort}", [one], f"{kind} a step"))
            figures.append(figure(f"overhead/{sort}_a_pass", [(more - one) / (PASSES - 1)], f"{kind} a micro-batch"))
    return figures


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
        *counts(),
        figure("overhead/exchange_in_backward_ms", inside, "ms"),
        figure("overhead/exchange_outside_ms", outside, "ms"),
    ]
    for name, passes in (("us", 1), (f"us_of_{PASSES}_passes", PASSES)):
        with tempfile.TemporaryDirectory() as folder:
            more, by_loop = more_us(Path(folder), passes, 15 if quick else 60)
        figures.append(figure(f"overhead/{name}", more, "us a step"))
        figures.append(figure(f"overhead/{name}_by_hand", by_loop, "us a step"))
    for name in LAYERS:
        loop(name, STEPS[name])  # the first in a size is slower, whichever it is
        mine, theirs = [], []
        for number in range(4 if quick else 16):
            if number % 2:
                theirs.append(loop(name, STEPS[name]))
            with tempfile.TemporaryDirectory() as folder:
                mine.append(ours(name, STEPS[name], Path(folder)))
            if number % 2 == 0:
                theirs.append(loop(name, STEPS[name]))
            np.testing.assert_allclose(mine[-1][1], theirs[-1][1], rtol=1e-5)
        mine, theirs = [seconds for seconds, _ in mine], [seconds for seconds, _ in theirs]
        figures.append(figure(f"overhead/{name}", ratios(mine, theirs), "ratio"))
        figures.append(figure(f"overhead/{name}_loop_ms", [1e3 * s for s in theirs], "ms"))
    return figures


if __name__ == "__main__":
    main(__doc__, measure)
