"""The loops that a user would write by hand, on one rank: no exchange, DDP over Gloo or NCCL, stock Horovod.

Those whose name goes on, such as ddp_fp16, compress what they exchange by what the library brings for it.

``python peer_loops.py PEER SETTING FILE``: trains what SETTING (a `jobs.Setting` as JSON) says until it is ended; rank
0 appends a line of JSON to FILE for each step, with its end and its seconds, as our journal does. Same model, data,
loss, clipping and optimizer as ours; accumulation as each library documents it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jobs import Setting
from models import MODELS, device
from peer_packages import use_packages
from torch.utils.data import DataLoader

from hvdtrain.config.schema import OptimizerConfig
from hvdtrain.training.loop.step import to_device
from hvdtrain.training.start.optimizers import make_optimizer

Loop = tuple[int, Any, Any, Callable[[bool], Any]]
"""This rank, model and optimizer as the library wraps them, and the context of a pass, given whether it is the last."""


def batches(task: Any, micro_batch: int, rank: int, *, pin_memory: bool) -> Iterator[Any]:
    options = {"collate_fn": task.collate, "generator": torch.Generator().manual_seed(rank), "pin_memory": pin_memory}
    while True:
        yield from DataLoader(task.train_data, micro_batch, shuffle=True, drop_last=True, **options)


def join_group(backend: str) -> int:
    """Join the group that jobs.py's environment describes; this rank."""
    torch.distributed.init_process_group(backend)
    return torch.distributed.get_rank()


def no_exchange(model: Any, optimizer: Any, passes: int) -> Loop:
    """Each rank for itself; a group only to start together."""
    return join_group("gloo"), model, optimizer, _nothing


def lockstep(model: Any, optimizer: Any, passes: int) -> Loop:
    """Each rank for itself, but for that none goes on to its next step before the other."""
    rank = join_group("gloo")
    optimizer.register_step_pre_hook(lambda *_: torch.distributed.barrier())
    return rank, model, optimizer, _nothing


def ddp(model: Any, optimizer: Any, passes: int, bucket_cap_mb: int | None = None) -> Loop:
    """DistributedDataParallel, no_sync on all but the last micro-batch."""
    rank = join_group("nccl" if device().type == "cuda" else "gloo")
    wrapped = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb)
    return rank, wrapped, optimizer, lambda last: contextlib.nullcontext() if last else wrapped.no_sync()


def ddp_fp16(model: Any, optimizer: Any, passes: int) -> Loop:
    """DDP with torch's hook that sends halves."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    rank, wrapped, optimizer, exchange_if_last = ddp(model, optimizer, passes)
    wrapped.register_comm_hook(None, fp16_compress_hook)
    return rank, wrapped, optimizer, exchange_if_last


def ddp_powersgd(model: Any, optimizer: Any, passes: int) -> Loop:
    """DDP with torch's PowerSGD hook at rank 4, from the third step on.

    In one bucket: the hook starts collectives from callbacks, which over Gloo run in another order on each rank where
    there are several; the job ends with "Received data size doesn't match expected size".
    """
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    rank, wrapped, optimizer, exchange_if_last = ddp(model, optimizer, passes, bucket_cap_mb=1024)
    state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, powerSGD_hook)
    return rank, wrapped, optimizer, exchange_if_last


def torchft_diloco(model: Any, optimizer: Any, passes: int) -> Loop:
    """Torchft's DiLoCo every 8 steps, in fp32 (its int8 is for GPUs): each rank is a replica of its own."""
    use_packages()
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo

    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    host = os.environ["MASTER_ADDR"] if rank == 0 else own_address(os.environ["MASTER_ADDR"])
    if rank == 0:
        _KEPT.append(LighthouseServer(f"0.0.0.0:{port}", int(os.environ["WORLD_SIZE"])))
    store = torch.distributed.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        ProcessGroupGloo(),
        None,
        None,
        int(os.environ["WORLD_SIZE"]),
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        lighthouse_addr=f"http://{os.environ['MASTER_ADDR']}:{port}",
        replica_id=f"replica{rank}",
        hostname=host,
    )
    outer = torch.optim.SGD(model.parameters(), 0.8, 0.5, nesterov=True)
    exchange = DiLoCo(manager, [model], optimizer, outer, 8, pin_memory=False)
    _KEPT.extend([store, manager, exchange, exchange.__enter__()])
    return rank, model, optimizer, _nothing


_KEPT: list[Any] = []
"""What must live as long as the process."""


def own_address(other: str) -> str:
    """Return the address of this host on its way to another one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))
        return str(probe.getsockname()[0])


def stock_horovod(model: Any, optimizer: Any, passes: int, compression: str = "none") -> Loop:
    """Horovod as its own examples use it."""
    import horovod.torch as hvd

    return _by_horovod(hvd, model, optimizer, passes, compression=getattr(hvd.Compression, compression))


def drop_in(model: Any, optimizer: Any, passes: int, views: bool = False) -> Loop:
    """The same script with hvdtrain.torch."""
    import hvdtrain.torch as hvd

    return _by_horovod(hvd, model, optimizer, passes, gradient_as_bucket_view=views)


def _by_horovod(hvd: Any, model: Any, optimizer: Any, passes: int, **options: Any) -> Loop:
    hvd.init()
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=passes, **options
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return hvd.rank(), model, optimizer, _nothing


def _nothing(last: bool) -> Any:
    return contextlib.nullcontext()


PEERS: dict[str, Callable[[Any, Any, int], Loop]] = {
    "no_exchange": no_exchange,
    "lockstep": lockstep,
    "ddp": ddp,
    "ddp_fp16": ddp_fp16,
    "ddp_powersgd": ddp_powersgd,
    "torchft_diloco": torchft_diloco,
    "stock_horovod": stock_horovod,
    "stock_horovod_fp16": partial(stock_horovod, compression="fp16"),
    "drop_in": drop_in,
    "drop_in_views": partial(drop_in, views=True),
}

BY_HOROVODRUN = ("stock_horovod", "drop_in")
"""What the names of peers begin with that horovodrun starts, and whose optimizers exchange gradients."""


def follow(optimizer: Any, model: Any, clip: float, peer: str) -> None:
    exchanges = peer.startswith(BY_HOROVODRUN)
    if clip and exchanges:
        optimizer.synchronize()
    if clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    with optimizer.skip_synchronize() if clip and exchanges else contextlib.nullcontext():
        optimizer.step()


def main() -> None:
    peer, setting, file = sys.argv[1], Setting(**json.loads(sys.argv[2])), sys.argv[3]
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)
    if device().type == "cuda":
        torch.cuda.set_device(device())
    task = MODELS[setting.model](**setting.arguments)
    own = task.model.to(device())
    options = OptimizerConfig(**setting.optimizer)
    rank, model, optimizer, exchange_if_last = PEERS[peer](own, make_optimizer(own, options), setting.passes)
    pin_memory = device().type == "cuda" and setting.ours.get("loader.pin_memory") != "off"
    source = batches(task, setting.micro_batch, rank, pin_memory=pin_memory)
    journal = Path(file).open("a", buffering=1) if rank == 0 else None
    for step in itertools.count(1):
        start = time.perf_counter()
        optimizer.zero_grad()
        for index in range(setting.passes):
            with exchange_if_last(index == setting.passes - 1):
                loss, weight = task.loss(model, to_device(next(source), device()))
                (loss / weight / setting.passes).backward()
        follow(optimizer, own, setting.clip, peer)
        if journal is not None:
            journal.write(json.dumps({"step": step, "time": time.time(), "step_s": time.perf_counter() - start}) + "\n")


if __name__ == "__main__":
    main()
