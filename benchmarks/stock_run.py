"""A user's script on stock Horovod: the default language model, on the samples that ours would take, to a loss.

``python stock_run.py SEED STEPS EVERY FILE``: rank 0 writes a line of JSON a step, with its seconds, and one for each
evaluation, which no step's seconds hold, as our journal does. What ours does by itself is written out here: the mean
over the global batch, clipping, the schedule.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import horovod.torch as hvd
import torch
from models import MODELS

from hvdtrain.comm.solo import SoloComm
from hvdtrain.config.schema import Config
from hvdtrain.data.loader import Stream, dataset_length, seed_forward, train_batches
from hvdtrain.training.loop.evaluate import HeldOut, evaluate
from hvdtrain.training.loop.forward import Precision
from hvdtrain.training.start.optimizers import lr_schedule, make_optimizer

CPU = torch.device("cpu")


def main() -> None:
    seed, steps, every, file = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    task, config = MODELS["default"](), Config()
    train = config.train
    stream = Stream(task.train_data, seed, train.global_batch, train.micro_batch, hvd.rank(), hvd.size())
    passes = len(stream.step(0))
    optimizer = hvd.DistributedOptimizer(
        make_optimizer(task.model, config.optimizer),
        named_parameters=task.model.named_parameters(),
        backward_passes_per_step=passes,
    )
    hvd.broadcast_parameters(task.model.state_dict(), root_rank=0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_schedule(config.optimizer, steps))
    batches = train_batches(stream, 0, steps, config.loader, task.collate, on_cuda=False)
    lines = Path(file).open("a", buffering=1) if hvd.rank() == 0 else None
    assert dataset_length(task.train_data) >= train.global_batch
    held_out = HeldOut(task, SoloComm(), replace(config, train=replace(train, eval_samples=64)), CPU)
    for step in range(steps + 1):
        if lines is not None and step % every == 0:
            found = evaluate(held_out, task.model, Precision("fp32", CPU))
            assert found is not None
            lines.write(json.dumps({"event": "evaluation", "at_step": step, "loss": found.loss}) + "\n")
        hvd.barrier()
        if step == steps:
            break
        start = time.perf_counter()
        optimizer.zero_grad()
        for place in stream.step(step * train.global_batch):
            seed_forward(seed, place.start)
            loss, weight = task.loss(task.model, next(batches).batch)
            (loss / weight / passes).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(task.model.parameters(), train.clip)
        with optimizer.skip_synchronize():
            optimizer.step()
        schedule.step()
        if lines is not None:
            lines.write(json.dumps({"step": step + 1, "step_s": time.perf_counter() - start}) + "\n")


if __name__ == "__main__":
    main()
