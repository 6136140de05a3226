"""What do the spans cost that every rank records all the time?

A real run of a step of some 10 ms says which spans a step makes. They are then made over and over by themselves, after
work that leaves the caches as a step does, and timed: what a trainer without spans would not spend. Among them are the
exchange of one bucket, which one process has not, the sums, and the trace's look whether it is due.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from common import Figure, figure, main
from overhead import options, task

import hvdtrain
from hvdtrain.config.windows import Window
from hvdtrain.observe.span_trace import SpanTrace
from hvdtrain.spans import EXCHANGE, Spans

STEP_US = 10_000.0
STEPS = 20


def recorded(folder: Path) -> list[str]:
    """Names of the spans of one step, in the order in which they ended, as a real run records them."""
    hvdtrain.train(options(STEPS, folder), task(1024, 7))
    events = json.loads((folder / "timeline" / "spans-rank-0.json").read_text())
    return [e["name"] for e in events if e["ph"] == "X" and e["args"]["step"] == STEPS - 3 and e["name"] != "gc"]


def one_step(spans: Spans, trace: SpanTrace, names: list[str], step: int) -> None:
    trace.begin_step(step)
    spans.step = step
    start = spans.now()
    for name in names:
        if name == "step":
            spans.record(name, start)
        else:
            with spans(name):
                pass
    spans.record("exchange", start, EXCHANGE)
    spans.pop_seconds()


def cost_us(names: list[str], folder: Path, repeats: int) -> float:
    spans = Spans()
    trace = SpanTrace(spans, folder, 0, "host", Window(1, 20), warn=print)
    work, other = torch.zeros(8 << 20), torch.ones(8 << 20)
    seconds = []
    with spans.collections():
        for step in range(1, repeats + 1):
            work.copy_(other)  # 64 MB go through the caches
            start = time.perf_counter()
            one_step(spans, trace, names, step)
            seconds.append(time.perf_counter() - start)
    trace.close()
    return 1e6 * statistics.median(seconds)


def measure(quick: bool) -> list[Figure]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        names = recorded(Path(folder))
        costs = [cost_us(names, Path(folder), 100 if quick else 400) for _ in range(3 if quick else 9)]
    return [
        figure("spans/a_step", [len(names) + 1.0], "spans"),
        figure("spans/us", costs, "us a step"),
        figure("spans/percent_of_10ms_step", [100 * cost / STEP_US for cost in costs], "%"),
    ]


if __name__ == "__main__":
    main(__doc__, measure)
