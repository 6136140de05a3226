"""A user's elastic script: the default language model on stock Horovod's elastic, or on DDP under torchrun.

``python recovery_peer.py stock|torchrun FOLDER``, by the launcher of either: trains until it is ended. Each process
appends lines of JSON to a file of its own in FOLDER: what it came to, and when (`recovery_marks.Mark`). As each is
documented: `TorchState` with a commit, or rank 0's checkpoint that all load at the start, each `EVERY` steps.
The global batch stays the same, whoever is left, and so do the samples of each step.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

EVERY, MICRO_BATCH, PASSES, CLIP = 10, 4, 2, 1.0
SEEN = Path(sys.argv[2] if len(sys.argv) > 2 else os.devnull) / f"{os.getpid()}.marks"


def mark(kind: str, **facts: int) -> None:
    """Leave word of what was come to."""
    with SEEN.open("a") as file:
        file.write(json.dumps({"kind": kind, "time": time.time(), "pid": os.getpid(), **facts}) + "\n")


def samples(task: Any) -> Callable[[int], list[Any]]:
    """The micro-batches of each step, counted from 0, of all ranks together: shuffled, without end."""
    import torch
    from torch.utils.data import default_collate

    collate = task.collate or default_collate
    length = len(task.train_data)
    order = torch.randperm(length, generator=torch.Generator().manual_seed(0)).tolist()

    def of(step: int) -> list[Any]:
        first = step * PASSES * MICRO_BATCH
        chosen = [task.train_data[order[(first + n) % length]] for n in range(PASSES * MICRO_BATCH)]
        return [collate(chosen[n : n + MICRO_BATCH]) for n in range(0, len(chosen), MICRO_BATCH)]

    return of


def stock() -> None:
    """Horovod's elastic, as its documentation has it."""
    import horovod.torch as hvd
    import torch
    from models import default

    from hvdtrain.config.schema import Config
    from hvdtrain.training.start.optimizers import make_optimizer

    class State(hvd.elastic.TorchState):
        """Says how far it is."""

        def restore(self) -> None:
            mark("failed")
            super().restore()

        def sync(self) -> None:
            mark("met", rank=hvd.rank(), size=hvd.size())
            super().sync()
            mark("restored")

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    task = default()
    of = samples(task)
    optimizer = hvd.DistributedOptimizer(
        make_optimizer(task.model, Config().optimizer),
        named_parameters=task.model.named_parameters(),
        backward_passes_per_step=PASSES // hvd.size(),
    )

    @hvd.elastic.run
    def train(state: Any) -> None:
        rank, size = hvd.rank(), hvd.size()
        optimizer.set_backward_passes_per_step(PASSES // size)
        while True:
            optimizer.zero_grad()
            for batch in of(state.step)[rank::size]:
                loss, weight = task.loss(task.model, batch)
                (loss / weight * size / PASSES).backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(task.model.parameters(), CLIP)
            with optimizer.skip_synchronize():
                optimizer.step()
            state.step += 1
            mark("step", step=state.step, rank=rank, size=size)
            if state.step % EVERY == 0:
                state.commit()

    train(State(model=task.model, optimizer=optimizer, step=0))


def torchrun() -> None:
    """DistributedDataParallel over Gloo, with a checkpoint to come back to."""
    mark("failed")  # by then torchrun has seen it, and ended the others
    import torch
    from models import default

    from hvdtrain.config.schema import Config
    from hvdtrain.training.start.optimizers import make_optimizer

    torch.distributed.init_process_group("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mark("met", rank=rank, size=size)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    task = default()
    of, step, saved = samples(task), 0, SEEN.with_name("checkpoint.pt")
    optimizer = make_optimizer(task.model, Config().optimizer)
    if saved.exists():
        found = torch.load(saved, weights_only=True)
        task.model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        step = found["step"]
    model = torch.nn.parallel.DistributedDataParallel(task.model)
    mark("restored")
    while True:
        optimizer.zero_grad()
        mine = of(step)[rank::size]
        for number, batch in enumerate(mine, 1):
            with contextlib.nullcontext() if number == len(mine) else model.no_sync():
                loss, weight = task.loss(model, batch)
                (loss / weight * size / PASSES).backward()
        torch.nn.utils.clip_grad_norm_(task.model.parameters(), CLIP)
        optimizer.step()
        step += 1
        mark("step", step=step, rank=rank, size=size)
        if rank == 0 and step % EVERY == 0:
            state = {"model": task.model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, saved.with_suffix(".new"))
            saved.with_suffix(".new").replace(saved)


if __name__ == "__main__":
    {"stock": stock, "torchrun": torchrun}[sys.argv[1]]()
