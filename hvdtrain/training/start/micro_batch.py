"""Find the largest micro-batch that fits the memory of every GPU (`--train.micro_batch auto`).

By a trial; for engines with collectives in each pass by a prediction, because a trial would leave the other ranks in a
collective if memory ran out on one.
"""

from __future__ import annotations

import gc
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from torch.utils.data import default_collate

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import allgather_json, on_rank_0
from hvdtrain.compression.table import parse
from hvdtrain.config.schema import AUTO, Config
from hvdtrain.data.loader import Stream, fetch_step, seed_forward
from hvdtrain.data.order import micro_batches
from hvdtrain.errors import ConfigError
from hvdtrain.files import write_text
from hvdtrain.observe.failure.fault import out_of_memory
from hvdtrain.observe.past_journal import read_events
from hvdtrain.plan.plan import AUTO as AUTO_COMPRESSION
from hvdtrain.programs import run_program
from hvdtrain.training.loop.buffers import restored_buffers
from hvdtrain.training.loop.forward import checked_loss, to_device
from hvdtrain.training.records.memory import memory_advice
from hvdtrain.training.round import Round
from hvdtrain.yaml_file import yaml_text

FOUND = "micro_batch_found"
"""Event: `samples` of a micro-batch, and `limited_by`, the ranks with too little memory for twice as many."""
_UNEVEN = 1.25  # how many samples a rank may have, as a multiple of an even share
_SPARE = 0.05  # fraction of a GPU's memory that a trial leaves free
_STATES = 2  # tensors of the optimizer for each parameter, as of AdamW

_GIB = 1 << 30
_COMMUNICATION_BYTES = _GIB  # memory that NCCL takes
_GAPS = 0.1  # fraction of the rest that is lost between blocks of memory


def check_auto(config: Config, device: torch.device) -> None:
    """Check that the micro-batch can be found, if it is asked for, before anything costs time.

    Errors: ConfigError: it cannot.
    """
    if config.train.micro_batch == AUTO and device.type != "cuda":
        raise ConfigError(
            "--train.micro_batch auto cannot find a size: this rank trains on a CPU, which uses the memory of the whole"
            " host",
            expected="GPUs",
            next_step="set a number, such as --train.micro_batch 4",
        )


def sizes_to_try(global_batch: int, ranks: int) -> list[int]:
    """Return powers of two, ascending, that divide the work evenly: see `_UNEVEN`. 1 is always among them."""
    share = -(-global_batch // ranks)
    powers = takewhile(lambda size: size <= share, (1 << n for n in range(32)))

    def busiest(size: int) -> int:
        return sum(batch.stop - batch.start for batch in micro_batches([(0, global_batch)], size, 0, ranks))

    return [size for size in powers if size == 1 or busiest(size) <= _UNEVEN * global_batch / ranks]


def find_largest(comm: Comm, sizes: list[int], run: Callable[[int], None]) -> tuple[int, list[int]]:
    """Return the largest of ascending `sizes` that fits on all ranks, and the ranks that lack memory for the next.

    0 if the first does not fit. `run` raises an error if memory runs out. All ranks try the same sizes, up to the
    first that does not fit on one of them. Collective: yes; `run` has no collectives.
    """
    found, lacking = 0, list[int]()
    for size in sizes:
        is_enough = _fits(partial(run, size))
        lacking = [rank for rank, fits in enumerate(allgather_json(comm, is_enough, name="micro_batch")) if not fits]
        if lacking:
            break
        found = size
    return found, lacking


def _fits(run: Callable[[], None]) -> bool:
    try:
        run()
    except Exception as error:
        if not out_of_memory(error):
            raise
        return False
    return True


def use_found_micro_batch(current: Round) -> None:
    """Set the micro-batch of the round's config, if it is to be found. Collective: yes.

    The first round of a job finds it; ranks that join later get it. A resumed run never gets a larger one than before:
    its samples, and random numbers, stay those of its micro-batches.

    Errors: ConfigError: not even one sample fits.
    """
    worker = current.worker
    if current.run.config.train.micro_batch != AUTO:
        return
    found, lacking = max(allgather_json(current.comm, worker.micro_batch, name="micro_batch/found")), list[int]()
    if not found:
        found, lacking = _search(current)
    worker.micro_batch = found
    current.recorder.event({"event": FOUND, "samples": found, "limited_by": lacking})
    config = current.run.config
    current.run = replace(current.run, config=replace(config, train=replace(config.train, micro_batch=found)))


def _search(current: Round) -> tuple[int, list[int]]:
    """Return the largest micro-batch, and the ranks that lack memory for the next. Collective: yes."""
    config, comm, worker = current.run.config, current.comm, current.worker
    before = on_rank_0(comm, lambda: read_events(current.layout.journal, FOUND), name="micro_batch/before")
    most = before[-1]["samples"] if before else config.train.global_batch
    _, places, _ = worker.plan.dimensions.samples(comm.rank, comm.size)
    sizes = [size for size in sizes_to_try(config.train.global_batch, places) if size <= most]
    if worker.plan.places_model or worker.plan.dimensions:  # no rank can try a pass alone
        found, lacking = predict_largest(current, sizes[-1])
    else:
        with _without_trace(current):
            found, lacking = find_largest(comm, sizes, partial(try_pass, current))
    if not found:
        advice = memory_advice(config, worker.state.model, worker.device, comm.size, elastic=current.rounds.elastic)
        raise ConfigError(
            f"no micro-batch fits: rank(s) {', '.join(map(str, lacking))} lack memory for one sample, with optimizer"
            " and exchange",
            next_step="; or ".join(advice) or "a GPU with more memory, or a smaller model",
        )
    limit = "as before in this run" if before else "larger ones would not divide the global batch evenly among ranks"
    if lacking:
        limit = f"rank(s) {', '.join(map(str, lacking))} lack memory for more"
    current.recorder.say(f"micro-batches of {found}: {limit}")
    return found, lacking


def try_pass(current: Round, samples: int) -> None:
    """Run forward and backward of the first samples, while the memory that training will need besides is taken.

    It has no collectives, and comes before the engine. Call it inside of `_without_trace`. Errors: that of torch if
    memory runs out.
    """
    worker, config = current.worker, current.run.config
    task, device = worker.task, worker.device
    stream = Stream(task.train_data, config.seed, samples, samples, 0, 1)
    ((_, _, drawn),) = fetch_step(stream, 0)
    batch = to_device((task.collate or default_collate)(drawn), device)
    reserve = torch.empty(_reserve_bytes(current), dtype=torch.uint8, device=device)
    for _ in range(2):  # the second adds to gradients that exist
        seed_forward(config.seed, 0)
        with worker.precision.weights():
            with worker.precision.autocast():
                loss, _ = checked_loss(task, worker.state.model, batch)
            torch.autograd.backward(loss)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    del reserve


def _reserve_bytes(current: Round) -> int:
    """Return the bytes of the optimizer's state, of averages, of the exchange, and some to spare."""
    device, plan, size = current.worker.device, current.worker.plan, current.comm.size
    if device.type != "cuda":
        return 0
    trained = sum(p.numel() * p.element_size() for p in current.worker.state.model.parameters() if p.requires_grad)
    averages = trained if plan.averaged else 0
    states = 0 if plan.offload else _STATES * trained // (size if plan.shard != "none" else 1)
    feedback = plan.compression == AUTO_COMPRESSION or parse(plan.compression).kind.feedback
    exchange = (1 + feedback) * trained if size > 1 or current.rounds.elastic else 0
    return states + averages + exchange + int(_SPARE * torch.cuda.get_device_properties(device).total_memory)


@contextmanager
def _without_trace(current: Round) -> Iterator[None]:
    """Undo what passes change: gradients, persistent buffers, random states and memory. Compiled parts run eagerly."""
    model, device = current.worker.state.model, current.worker.device
    on_cuda = device.type == "cuda"
    python, numpy = random.getstate(), np.random.get_state()
    eager: Any = torch.compiler.set_stance("force_eager") if current.worker.compiled else nullcontext()
    try:
        with torch.random.fork_rng([device] if on_cuda else []), restored_buffers(model), eager:
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for parameter in model.parameters():
            parameter.grad = None
        gc.collect()  # an error's traceback may hold activations
        if on_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)


def predict_largest(current: Round, most: int) -> tuple[int, list[int]]:
    """Return the largest micro-batch up to `most` samples, and the ranks with the least memory if that limits it.

    0 if one sample does not fit. A trial like those of other engines would leave the other ranks in a collective if
    memory ran out on one.
    Collective: yes.

    Errors: ConfigError: the memory of the job cannot be predicted.
    """
    limit = current.run.config.memory.limit
    memory = allgather_json(current.comm, _usable_bytes(current.worker.device, limit), name="micro_batch/memory")
    fitting = on_rank_0(current.comm, partial(_ask, current, min(memory)), name="micro_batch/predicted")
    if fitting >= most:
        return most, []
    return fitting, [rank for rank, usable in enumerate(memory) if usable == min(memory)]


def _usable_bytes(device: torch.device, limit_gib: float | None) -> int:
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - _COMMUNICATION_BYTES
    usable = free if limit_gib is None else min(free, limit_gib * _GIB)
    return int((1 - _GAPS) * usable)


def _ask(current: Round, usable_bytes: int) -> int:
    """Return the largest micro-batch by `hvdtrain fit`.

    It is another process, because a prediction needs torch's default process group for ranks that do not exist.
    """
    worker, ranks = current.worker, current.comm.size
    with tempfile.TemporaryDirectory() as scratch:
        config = Path(scratch) / "options.yaml"
        write_text(config, yaml_text(current.run.resolved))
        given = ["--ranks", str(ranks), "--gib", str(usable_bytes / _GIB), "--config", str(config)]
        argv = [sys.executable, "-m", "hvdtrain", "fit", "--json", *given, "--parallel.device", worker.device.type]
        done = run_program(argv, None, folder=worker.info.folder)
    reason = next((text for text in done.err.splitlines() if "Error" in text), f"exit code {done.code}")
    lines: list[dict[str, Any]] = orjson.loads(done.out) if done.out else [{"memory": None, "refused": reason}]
    (line,) = lines
    if line["memory"] is None:
        raise ConfigError(
            "--train.micro_batch auto cannot predict the memory of this job",
            expected="a task of a module or a file, with steps that hvdtrain fit can predict",
            found=line["refused"],
            next_step="set a number, such as --train.micro_batch 4",
        )
    return int(line["micro_batch"]) if done.code == 0 else 0
