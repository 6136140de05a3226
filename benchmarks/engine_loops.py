"""Loops of the peers of our engines, on one rank: DDP, its sharded optimizer, accelerate, lightning, DeepSpeed, FSDP2,
transformers.

``python engine_loops.py PEER SETTING FILE [STEPS]``: trains what SETTING (a `jobs.Setting` as JSON) says until it is
ended; rank 0 appends a line of JSON to FILE for each step, with its end, its seconds since the end of the last one, and
its loss on this rank. With STEPS it ends after as many, and each rank writes its parameters next to FILE. Same model,
data, loss, clipping and optimizer for all; each library as its documentation uses it.

accelerate, lightning and deepspeed are optional: `peer_packages.py` says how to install them.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jobs import Setting
from models import MODELS
from peer_loops import batches, join_group
from peer_packages import use_packages
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hvdtrain.config.schema import OptimizerConfig
from hvdtrain.training.start.optimizers import make_optimizer


@dataclass
class Given:
    """What a peer trains.

    Attributes:
        model: of the task.
        loss: of a model and a batch, the mean over the batch.
        options: of the optimizer.
        clip: largest norm of the gradient, 0 for any.
        micro_batch: samples a batch.
        source: batches of this rank, without end.
        ended: takes the loss of a step that has just ended; returns whether to end training.
    """

    model: Any
    loss: Callable[[Any, Any], Tensor]
    options: OptimizerConfig
    clip: float
    micro_batch: int
    source: Iterator[Any]
    ended: Callable[[float], bool]

    def train(self, model: Any, optimizer: Any, clip: Any, backward: Any = Tensor.backward) -> None:
        """Run the usual loop; `clip` takes parameters and the largest norm."""
        for batch in self.source:
            optimizer.zero_grad()
            loss = self.loss(model, batch)
            backward(loss)
            if self.clip:
                clip(model.parameters(), self.clip)
            optimizer.step()
            if self.ended(loss.item()):
                return


def no_exchange(given: Given) -> None:
    """Each rank by itself; a group only to start together."""
    join_group("gloo")
    given.train(given.model, make_optimizer(given.model, given.options), torch.nn.utils.clip_grad_norm_)


def ddp(given: Given) -> None:
    """DistributedDataParallel over Gloo."""
    join_group("gloo")
    optimizer = make_optimizer(given.model, given.options)
    given.train(DistributedDataParallel(given.model), optimizer, torch.nn.utils.clip_grad_norm_)


def ddp_zero(given: Given) -> None:
    """DDP, and torch's optimizer whose state is sharded."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    join_group("gloo")
    whole = make_optimizer(given.model, given.options)
    groups = [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in whole.param_groups]
    options = {n: value for n, value in whole.defaults.items() if n in ("lr", "betas", "eps", "momentum", "fused")}
    optimizer = ZeroRedundancyOptimizer(groups, type(whole), **options)
    given.train(DistributedDataParallel(given.model), optimizer, torch.nn.utils.clip_grad_norm_)


def fsdp2(given: Given) -> None:
    """fully_shard of each block and of the rest, over Gloo."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    join_group("gloo")
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in given.model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(given.model, mesh=mesh)
    optimizer = make_optimizer(given.model, given.options)
    if given.options.name == "sgd":  # torch's fused one refuses sharded tensors
        for group in optimizer.param_groups:
            group["fused"] = False
    given.train(given.model, optimizer, torch.nn.utils.clip_grad_norm_)


def transformers_ep(given: Given) -> None:
    """Expert parallelism of transformers, which divides everything else by FSDP2, over Gloo."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    join_group("gloo")
    ranks = torch.distributed.get_world_size()
    with tempfile.TemporaryDirectory() as folder:
        given.model.config.save_pretrained(folder)
        save_file(whole(given.model), f"{folder}/model.safetensors")
        layout = DistributedConfig(fsdp_size=ranks, ep_size=ranks)
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=layout)
    model.train()
    given.train(model, make_optimizer(model, given.options), torch.nn.utils.clip_grad_norm_)


def accelerate(given: Given) -> None:
    """An Accelerator that prepares model and optimizer; the batches are those of the other peers."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(given.model, make_optimizer(given.model, given.options))
    given.train(model, optimizer, accelerator.clip_grad_norm_, accelerator.backward)


def lightning(given: Given) -> None:
    """A LightningModule and a Trainer without logger, checkpoints, progress bar and summary."""
    from lightning import Callback, LightningModule, Trainer
    from lightning.pytorch.plugins.environments import LightningEnvironment

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = given.model

        def training_step(self, batch: Any, index: int) -> Tensor:
            return given.loss(self.model, batch)

        def configure_optimizers(self) -> Any:
            return make_optimizer(self.model, given.options)

    class Steps(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            trainer.should_stop = given.ended(outputs["loss"].item())

    class Source:
        def __iter__(self) -> Iterator[Any]:
            return given.source

    # Each process is a node of one device: so it is told apart by what jobs.py sets, on one host and on two.
    os.environ.update(NODE_RANK=os.environ["RANK"], LOCAL_RANK="0")
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")
    trainer = Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=1,
        num_nodes=int(os.environ["WORLD_SIZE"]),
        max_epochs=-1,
        gradient_clip_val=given.clip or None,
        callbacks=[Steps()],
        plugins=[LightningEnvironment()],  # it would look for another one by importing mpi4py, which starts MPI
        **dict.fromkeys(off, False),
    )
    trainer.fit(Module(), Source())


def deepspeed(given: Given, stage: int) -> None:
    """DeepSpeed's engine on CPUs over Gloo, with buckets of the size of DDP's: faster here than its default of 2 GB."""
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK="0")
    import deepspeed as library

    # Of inference only; it would be compiled at the start, and a job that is killed meanwhile leaves a lock behind.
    library.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    library.init_distributed("gloo", verbose=False)
    bucket_elements = 25 << 18
    config = {
        "train_micro_batch_size_per_gpu": given.micro_batch,
        "gradient_clipping": given.clip,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": bucket_elements,
            "allgather_bucket_size": bucket_elements,
        },
        "zero_allow_untested_optimizer": True,
        "steps_per_print": sys.maxsize,
    }
    optimizer = make_optimizer(given.model, given.options)
    engine, *_ = library.initialize(model=given.model, optimizer=optimizer, config=config)
    for batch in given.source:
        loss = given.loss(engine, batch)
        engine.backward(loss)
        engine.step()
        if given.ended(loss.item()):
            return


PEERS: dict[str, Callable[[Given], None]] = {
    "no_exchange": no_exchange,
    "ddp": ddp,
    "ddp_zero": ddp_zero,
    "fsdp2": fsdp2,
    "transformers_ep": transformers_ep,
    "accelerate": accelerate,
    "lightning": lightning,
    "deepspeed_zero1": partial(deepspeed, stage=1),
    "deepspeed_zero2": partial(deepspeed, stage=2),
}


def make_given(setting: Setting, rank: int, ended: Callable[[float], bool]) -> Given:
    """Build the model of a setting, as on every rank, and the batches of this one."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)
    task = MODELS[setting.model](**setting.arguments)

    def loss(model: Any, batch: Any) -> Tensor:
        total, weight = task.loss(model, batch)
        return total / weight

    source = batches(task, setting.micro_batch, rank, pin_memory=False)
    options = OptimizerConfig(**setting.optimizer)
    return Given(task.model, loss, options, setting.clip, setting.micro_batch, source, ended)


def whole(model: Any) -> dict[str, Tensor]:
    """Return copies of all parameters, whole. Collective: yes, where they are sharded."""
    named = ((name, parameter.detach()) for name, parameter in model.named_parameters())
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).clone() for n, p in named}


def main() -> None:
    from safetensors.torch import save_file

    peer, setting, file = sys.argv[1], Setting(**json.loads(sys.argv[2])), Path(sys.argv[3])
    last = int(sys.argv[4]) if len(sys.argv) > 4 else None
    rank, done, before = int(os.environ["RANK"]), 0, time.perf_counter()
    use_packages()
    with file.open("a", buffering=1) if rank == 0 else contextlib.nullcontext() as journal:

        def ended(loss: float) -> bool:
            nonlocal done, before
            done, now = done + 1, time.perf_counter()
            if journal is not None:
                record = {"step": done, "time": time.time(), "step_s": now - before, "loss": loss}
                journal.write(json.dumps(record) + "\n")
            before = now
            return done == last

        given = make_given(setting, rank, ended)
        PEERS[peer](given)
    save_file(whole(given.model), f"{file}.{rank}.safetensors")


if __name__ == "__main__":
    main()
