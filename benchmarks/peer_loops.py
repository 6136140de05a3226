"""The loops that a user would write by hand, on one rank: no exchange, DDP over Gloo, stock Horovod.

``python peer_loops.py PEER MODEL MICRO_BATCHES MICRO_BATCH FILE``: trains until it is ended; rank 0 appends a line of
JSON to FILE for each step, with its end and its seconds, as our journal does. Same model, data, loss, clipping and
optimizer as ours; accumulation as each library documents it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from models import MODELS
from torch.utils.data import DataLoader

from hvdtrain import Config
from hvdtrain.training.optimizers import make_optimizer


def batches(task: Any, micro_batch: int, rank: int) -> Iterator[Any]:
    """Shuffled batches without end."""
    generator = torch.Generator().manual_seed(rank)
    while True:
        yield from DataLoader(task.train_data, micro_batch, shuffle=True, drop_last=True, generator=generator)


def gloo() -> int:
    """Join the group that step.py's environment describes; this rank."""
    torch.distributed.init_process_group("gloo")
    return torch.distributed.get_rank()


def no_exchange(task: Any, passes: int) -> tuple[int, Any, Any, Callable[[bool], Any], Callable[[], None]]:
    """Each rank for itself; a group only to start together."""
    rank = gloo()
    return rank, task.model, make_optimizer(task.model, Config().optimizer), _nothing, _no_wait


def ddp(task: Any, passes: int) -> tuple[int, Any, Any, Callable[[bool], Any], Callable[[], None]]:
    """DistributedDataParallel, no_sync on all but the last micro-batch."""
    rank = gloo()
    model = torch.nn.parallel.DistributedDataParallel(task.model)
    optimizer = make_optimizer(task.model, Config().optimizer)
    return rank, model, optimizer, lambda last: contextlib.nullcontext() if last else model.no_sync(), _no_wait


def stock_horovod(task: Any, passes: int) -> tuple[int, Any, Any, Callable[[bool], Any], Callable[[], None]]:
    """Horovod as its own examples use it."""
    import horovod.torch as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(
        make_optimizer(task.model, Config().optimizer),
        named_parameters=task.model.named_parameters(),
        backward_passes_per_step=passes,
    )
    hvd.broadcast_parameters(task.model.state_dict(), root_rank=0)
    return hvd.rank(), task.model, optimizer, _nothing, optimizer.synchronize


def _nothing(last: bool) -> Any:
    return contextlib.nullcontext()


def _no_wait() -> None:
    pass


PEERS = {"no_exchange": no_exchange, "ddp": ddp, "stock_horovod": stock_horovod}


def main() -> None:
    """Train, time, write."""
    peer, name, passes, micro_batch, file = sys.argv[1:]
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)
    task = MODELS[name]()
    rank, model, optimizer, exchange_if_last, synchronize = PEERS[peer](task, int(passes))
    source = batches(task, int(micro_batch), rank)
    journal = Path(file).open("a", buffering=1) if rank == 0 else None
    for step in itertools.count(1):
        start = time.perf_counter()
        optimizer.zero_grad()
        total = 0.0
        for index in range(int(passes)):
            with exchange_if_last(index == int(passes) - 1):
                loss, weight = task.loss(model, next(source))
                (loss / weight / int(passes)).backward()
            total += loss.item()
        synchronize()
        torch.nn.utils.clip_grad_norm_(task.model.parameters(), 1.0)
        with optimizer.skip_synchronize() if peer == "stock_horovod" else contextlib.nullcontext():
            optimizer.step()
        if journal is not None:
            journal.write(json.dumps({"step": step, "time": time.time(), "step_s": time.perf_counter() - start}) + "\n")


if __name__ == "__main__":
    main()
