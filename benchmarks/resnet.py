"""How many images a second, by the protocol of Horovod's own synthetic benchmark: ours, stock Horovod and DDP?

ResNet-50, on each rank one batch of 32 random images of 224 x 224 that stays on its device, SGD at 0.01; 10 batches to
warm up, then 10 iterations of 10 batches; mean and 1.96 standard deviations over the iterations. On a CPU, where that
takes more than an hour, the batch is 4 images of 64 x 64, unless asked for otherwise. The model is transformers' with
group norm in the place of batch norm, for all contenders, and its loss is Horovod's: cross entropy.

The jobs take turns, an iteration each (see jobs.py), and are started twice; on GPUs, which go on where a process is
stopped, one job runs all its iterations before the next is started. Ratios are of the time of an iteration: below 1
ours is faster.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

import torch
from common import Figure, figure, options, ratios, report
from jobs import SGD, Job, Setting, race

CONTENDERS = ("ours", "stock_horovod", "ddp")
WARM_UP, BATCHES, ITERATIONS, STARTS = 10, 10, 10, 2
OURS = {"loader.pin_memory": "off"}  # the batch is on the device already
ON_CUDA = torch.cuda.is_available()


def iteration_s(job: Job) -> float:
    """Seconds from the end of a batch to the end of the tenth after it, all in one turn."""
    seen = len(job.steps())
    job.until(lambda steps: len(steps) > seen + BATCHES)
    ends = [step["time"] for step in job.steps()[seen:]]
    return ends[BATCHES] - ends[0]


def speed(name: str, seconds: Sequence[float], images: int) -> Figure:
    """The mean over iterations of `images` each, less and more 1.96 standard deviations."""
    speeds = [images / s for s in seconds]
    mean, spread = statistics.fmean(speeds), 1.96 * statistics.pstdev(speeds)
    return Figure(name, mean, mean - spread, mean + spread, "images/s, mean [-+ 1.96 sigma]")


def measure(arguments: argparse.Namespace) -> list[Figure]:
    ranks = torch.cuda.device_count() if ON_CUDA else 2
    batch = arguments.batch or (32 if ON_CUDA else 4)
    size = arguments.image_size or (224 if ON_CUDA else 64)
    model = {"preset": arguments.model, "size": size, "batch": batch}
    setting = Setting("resnet", batch, ranks=ranks, arguments=model, optimizer=SGD, clip=0.0, ours=OURS)
    about = f"{arguments.model}_{batch}x{size}x{size}"
    kind = "GPUs" if ON_CUDA else "CPU threads (the published protocol: resnet50, 32 images of 224 x 224 on each GPU)"
    print(f"{arguments.model}, {batch} images of {size} x {size} on each of {ranks} {kind}", flush=True)
    starts, iterations = (1, 2) if arguments.quick else (STARTS, ITERATIONS)
    seconds: dict[str, list[float]] = {}
    for names in [(name,) for name in CONTENDERS] if ON_CUDA else [CONTENDERS]:
        rounds = iterations // starts
        seconds |= race(names, setting, iteration_s, rounds=rounds, warm_up=WARM_UP, starts=starts)
    figures = [
        figure(f"resnet/{name}/{about}", ratios(seconds["ours"], seconds[name]), "ratio") for name in CONTENDERS[1:]
    ]
    for name in CONTENDERS:
        for place, count in (("per_rank", 1), ("total", ranks)):
            figures.append(speed(f"resnet/{name}_{place}/{about}", seconds[name], BATCHES * batch * count))
    return figures


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--model", default="resnet50", choices=("tiny", "resnet18", "resnet50"))
    parser.add_argument("--batch", type=int, help="images on each rank (32; 4 on a CPU)")
    parser.add_argument("--image_size", type=int, help="their height and width in pixels (224; 64 on a CPU)")
    given = parser.parse_args()
    report(measure(given), given.json)
