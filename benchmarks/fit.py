"""How far is `hvdtrain fit` from the memory that ranks hold, and how long does a prediction take?

For each configuration, a job of 2 or 4 ranks trains for real, and each rank counts the bytes of its live tensors in its
second and third step (`LiveBytes`), as torch's allocator on a GPU would, and of the results of collectives under way.
`fit_worst_percent` is the largest difference between a prediction and the rank with the most bytes,
`fit_median_percent` the median. No configuration was used to tune the prediction: it has no constants to tune. The
seconds are those of a prediction, without imports.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import Figure, figure, main
from jobs import environment

from hvdtrain import Task
from hvdtrain.comm.solo import imagined_ranks
from hvdtrain.config.parse import RunConfig, parse_argv, task_spec
from hvdtrain.fit.imagined_tensors import LiveBytes
from hvdtrain.fit.memory import predict_memory
from hvdtrain.task.base import load_task_function

MIB = 1 << 20
FIRST, LAST = 2, 4
"""Counts begin at the first pass of FIRST, and end at that of LAST."""
_SMALL = ("--train.global_batch=16", "--train.micro_batch=4")
_MANY = ("--train.global_batch=16", "--train.micro_batch=2")
_LLAMA = ("--task=models:llama15m", "--train.global_batch=8", "--train.micro_batch=2")
_WIDE = ("--task=tests/support/stack.py:wide", "--train.global_batch=4", "--train.micro_batch=2")
_IMAGE = ("--task=image", "--model.preset=resnet18", "--train.global_batch=16", "--train.micro_batch=4")
_SHARD, _SUMS, _FSDP = "--parallel.shard=optimizer", "--parallel.shard=gradients", "--parallel.engine=fsdp"
_DDP = "--parallel.engine=ddp"
_BF16, _INT8 = "--precision=bf16", "--parallel.compression=int8"
_FULL, _SELECTIVE = "--memory.checkpointing=full", "--memory.checkpointing=selective"
CONFIGURATIONS: list[tuple[int, tuple[str, ...]]] = [
    (2, _SMALL),
    (2, (*_SMALL, _BF16)),
    (2, (*_SMALL, "--precision=fp16")),
    (2, (*_SMALL, "--precision=bf16-weights")),
    (2, (*_SMALL, _DDP)),
    (2, (*_SMALL, _DDP, "--parallel.compression=bf16")),
    (2, (*_WIDE, _DDP, "--parallel.compression=fp16")),
    (2, (*_WIDE, _DDP, "--parallel.compression=powersgd:2")),
    (2, (*_SMALL, _SHARD)),
    (2, (*_SMALL, _SUMS, "--parallel.compression=bf16")),
    (2, (*_SMALL, _FSDP)),
    (2, (*_SMALL, _FSDP, "--precision=bf16-weights")),
    (2, (*_SMALL, _INT8)),
    (2, (*_SMALL, "--parallel.compression=powersgd:4")),
    (2, (*_SMALL, "--parallel.compression=topk")),
    (2, (*_SMALL, "--parallel.compression=topk:0.3")),
    (4, (*_SMALL, "--parallel.compression=topk:0.1")),
    (2, (*_SMALL, _FULL)),
    (2, (*_SMALL, _SELECTIVE, _SHARD)),
    (2, (*_SMALL, _FULL, _FSDP)),
    (2, (*_SMALL, "--optimizer.name=sgd")),
    (2, (*_SMALL, "--optimizer.name=muon", _SHARD)),
    (4, (*_SMALL, _SUMS)),
    (4, (*_SMALL, _FSDP, "--parallel.dp_shard=2")),
    (2, _LLAMA),
    (2, (*_LLAMA, _SUMS)),
    (2, (*_LLAMA, _FSDP, _BF16)),
    (2, (*_LLAMA, "--train.micro_batch=4", _SELECTIVE)),
    (4, (*_LLAMA, _FSDP)),
    (4, (*_LLAMA, _SHARD, _INT8)),
    *((4, (*_MANY, f"--parallel.{name}=2", *more)) for name in ("tp", "pp") for more in ((), (_FSDP,))),
    (2, _IMAGE),
    (2, (*_IMAGE, _SHARD)),
]
"""Numbers of ranks, and options of training."""
QUICK = (0, 8, 10, 17, 24)


def _parsed(options: tuple[str, ...]) -> tuple[RunConfig, Callable[[], Any]]:
    function = load_task_function(task_spec(options))
    run = parse_argv(list(options), function)
    return run, partial(function, **run.task_args)


class CountedComm:
    """Ranks whose collectives count with the bytes of their results from their start, which Horovod allocates then."""

    def __init__(self, comm: Any, live: LiveBytes) -> None:
        self._comm, self._live = comm, live

    def __getattr__(self, name: str) -> Any:
        """Return what the ranks have."""
        found = getattr(self._comm, name)
        if name == "subset":
            return lambda *arguments: CountedComm(found(*arguments), self._live)
        results = {"allgather": float(self._comm.size), "reducescatter": 1 / self._comm.size, "alltoall": 1.0}
        if name not in results:
            return found

        def start(tensor: torch.Tensor, **options: Any) -> Any:
            return CountedHandle(found(tensor, **options), int(tensor.nbytes * results[name]), self._live)

        return start


class CountedHandle:
    """A collective under way; its result is a tensor in the end."""

    def __init__(self, handle: Any, size: int, live: LiveBytes) -> None:
        self._handle, self._size, self._live = handle, size, live
        self._live.now += size
        self._live.peak = max(self._live.peak, self._live.now)

    def done(self) -> bool:
        """Return whether it is complete."""
        return bool(self._handle.done())

    def wait(self) -> torch.Tensor:
        """Return the result."""
        result: torch.Tensor = self._handle.wait()
        self._live.now, self._size = self._live.now - self._size, 0
        self._live.add([result])
        return result


class Counted:
    """A task's loss that counts the bytes of live tensors in some steps of a rank."""

    def __init__(self, task: Task, passes: int, live: LiveBytes) -> None:
        self._loss, self._passes, self._calls, self.live = task.loss, passes, 0, live
        self._before = {id(t) for t in gc.get_objects() if issubclass(type(t), torch.Tensor)}
        self._before -= {id(t) for t in (*task.model.parameters(), *task.model.buffers())}

    def __call__(self, model: Any, batch: Any) -> Any:
        """Count, then return the loss."""
        if torch.is_grad_enabled():
            self._calls += 1
            step = (self._calls - 1) // self._passes + 1
            if (self._calls - 1) % self._passes == 0 and step == FIRST:
                found = (t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and id(t) not in self._before)
                self.live.add(list(found))
                self.live.peak = self.live.now
                self.live.__enter__()
            elif (self._calls - 1) % self._passes == 0 and step == LAST:
                self.live.__exit__(None, None, None)
        return self._loss(model, batch)


def train_counted(folder: Path, options: tuple[str, ...]) -> None:
    """Train as one rank of a job, and write its count into the folder."""
    from hvdtrain.comm.rounds import OneRound, start_comm
    from hvdtrain.plan.plan import plan_of
    from hvdtrain.runtime.tuning import TimelinePlan, prepare
    from hvdtrain.training.session import run_training

    info, _ = prepare()
    run, build = _parsed(options)
    live = LiveBytes()
    comm: Any = CountedComm(start_comm(info, plan_of(run.config).groups), live)
    every = run.config.train.global_batch // run.config.train.micro_batch
    passes = plan_of(run.config).dimensions.own_passes(comm.size, every)

    def build_counted() -> Task:
        task = build()
        return replace(task, loss=Counted(task, passes, live))

    run_training(run, build_counted, OneRound(comm), TimelinePlan("off"), info)
    (folder / f"{info.rank}.json").write_text(json.dumps(live.peak))


def counted_peak(ranks: int, options: tuple[str, ...]) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        length = ("--train.steps=4", "--train.check_every=0", "--checkpoint.every=0", "--observe.tensorboard=false")
        argv = [sys.executable, str(Path(__file__)), "--count", scratch, *options, *length, f"--run_dir={scratch}/run"]
        job = ["mpirun", "-np", str(ranks), "--oversubscribe", *argv]
        subprocess.run(job, env=environment(), check=True, stdout=subprocess.DEVNULL, timeout=300)
        return max(json.loads(file.read_text()) for file in Path(scratch).glob("[0-9]*.json"))


def measure(quick: bool) -> list[Figure]:
    percents, seconds = [], []
    with imagined_ranks(4):
        for number in QUICK if quick else range(len(CONFIGURATIONS)):
            ranks, options = CONFIGURATIONS[number]
            began = time.monotonic()
            predicted = predict_memory(*_parsed(options), ranks).peak
            seconds.append(time.monotonic() - began)
            counted = counted_peak(ranks, options)
            percents.append(100 * abs(predicted / counted - 1))
            print(
                f"{ranks} ranks {' '.join(options)}: {predicted / MIB:.1f} predicted, {counted / MIB:.1f} MiB counted,"
                f" off by {100 * (predicted / counted - 1):+.1f}%, {seconds[-1]:.1f} s",
                file=sys.stderr,
            )
    return [
        figure("memory/fit_worst_percent", [max(percents)], "%"),
        figure("memory/fit_median_percent", percents, "%"),
        figure("memory/fit_s", seconds, "s"),
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--count"]:
        train_counted(Path(sys.argv[2]), tuple(sys.argv[3:]))
    else:
        main(__doc__, measure)
