"""Build a task under the run's seed, and check it. Only rank 0 may need the values of the model's parameters."""

from __future__ import annotations

import hashlib
import inspect
import random
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.optim import Optimizer

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import allgather_json
from hvdtrain.config.schema import Config
from hvdtrain.data.iterable import IterableSamples, is_iterable, sample_hash
from hvdtrain.data.loader import dataset_length, training_samples
from hvdtrain.data.order import mix_seed
from hvdtrain.engine.divisible import sparse_gradients
from hvdtrain.errors import ConfigError, LaunchError, TaskError
from hvdtrain.state.checkpoint_store import may_be_added
from hvdtrain.state.placeholder import parameters_without_memory, refuse_other_placeholders, values_read_later
from hvdtrain.task.base import Task
from hvdtrain.training.loop.forward import describe


def make_task(build: Callable[[], Any], config: Config) -> Task:
    """Build the task under the run's seed, and check it."""
    value = mix_seed(config.seed, 0)
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    try:
        with refuse_exit():
            task = build()
    except TypeError as error:
        if error.__traceback__ and error.__traceback__.tb_next is None:  # raised by the call itself
            raise TaskError("the task function does not accept the given options", found=str(error)) from error
        raise
    if not isinstance(task, Task):
        raise TaskError(
            "the task function returned an invalid value",
            expected="hvdtrain.Task(model, loss, train_data, ...)",
            found=describe(task),
        )
    for name, kind in (("model", torch.nn.Module), ("optimizer", (Optimizer, type(None)))):
        if not isinstance(getattr(task, name), kind):
            raise TaskError(
                f"the task's {name} is of the wrong type",
                expected="torch.nn.Module" if name == "model" else "torch.optim.Optimizer or None",
                found=describe(getattr(task, name)),
            )
    named = chain(task.model.named_parameters(), task.model.named_buffers())
    if without := [name for name, tensor in named if is_lazy(tensor) or tensor.is_meta]:
        raise TaskError(
            f"the task's model has {len(without)} parameters or buffers without values, such as {without[0]}",
            expected="a model with all shapes and values",
            found="a lazy module, or one on the device meta",
            next_step="run a batch through lazy modules in the task; make the model on the CPU",
        )
    if not any(parameter.requires_grad for parameter in task.model.parameters()):
        raise TaskError(
            "the task's model has no parameter to train",
            expected="one or more parameters with requires_grad",
            found=f"{sum(1 for _ in task.model.parameters())} parameters, all frozen",
        )
    takes = inspect.signature(type(task.optimizer).step).parameters if task.optimizer is not None else {}
    if "closure" in takes and takes["closure"].default is inspect.Parameter.empty:
        raise TaskError(
            f"the task's optimizer, {type(task.optimizer).__name__}, needs a closure, but the trainer has none",
            next_step="write your own loop with hvdtrain.torch's DistributedOptimizer, which accepts closures",
        )
    if wrong := sorted(name for name in task.files if not may_be_added(name)):
        raise TaskError(
            f"the task's files have a name that a checkpoint cannot have: {wrong[0]!r}",
            expected="file names without folders, and not those of hvdtrain's own files",
            next_step="use another name, such as config.json",
        )
    if wrong := [name for name, content in task.files.items() if not isinstance(content, bytes | bytearray)]:
        raise TaskError(
            f"the task's file {wrong[0]!r} has no content that can be written",
            expected="bytes",
            found=type(task.files[wrong[0]]).__name__,
            next_step="encode text: text.encode()",
        )
    for name, function, expected in (
        ("schedule", task.schedule, "schedule(step) or schedule(step, steps) -> factor on the learning rate"),
        ("loss", task.loss, "loss(model, batch) -> (sum of losses, weight)"),
    ):
        if not callable(function) and (function is not None or name == "loss"):
            raise TaskError(f"the task's {name} is not a function", expected=expected, found=describe(function))
    return task


def make_task_by_rank(make: Callable[[], Task], comm: Comm, *, may_read_later: bool = True) -> tuple[Task, str]:
    """Make the task; on ranks other than 0, the model's parameters have no memory. Collective: yes.

    On rank 0 they have none either if the task can read them later, and the job `may_read_later`.

    If that fails on a rank, it makes the task again, with all values. So it does if it has drawn other random numbers
    than rank 0, because its data could differ.

    Returns the task; and a warning if ranks other than 0 have made the whole model, else "".
    """
    task, reason, placeholders = None, "", list[str]()
    reading: AbstractContextManager[list[Any]] = values_read_later() if may_read_later else nullcontext([])
    emptying: AbstractContextManager[list[str]] = parameters_without_memory() if comm.rank else nullcontext([])
    with reading as later:
        try:
            with emptying as placeholders:
                task = make()
            if comm.rank or later:
                refuse_other_placeholders(task.model)
        except Exception as error:
            if not (placeholders or later):
                raise
            task = None
            if comm.rank:
                reason = f"{type(error).__name__}: {error}".partition("\n")[0]
    if task is None:
        task = make()
    numpys: Any = np.random.get_state()
    drawn = torch.get_rng_state().tolist(), random.getstate(), numpys[1].tolist(), numpys[2:]
    states = allgather_json(comm, hashlib.sha256(repr(drawn).encode()).hexdigest(), name="task/random")
    if placeholders and not reason and states[comm.rank] != states[0]:
        reason = "it draws other random numbers than on rank 0"
        task = make()
    reasons = allgather_json(comm, reason, name="task/whole")
    whole = [rank for rank, reason in enumerate(reasons) if reason]
    if not whole:
        return task, ""
    return task, (
        f"{len(whole)} rank(s) besides rank 0 have built the whole model in the memory of their host, because the task"
        f" cannot be made without values of parameters: {reasons[whole[0]]} (rank {whole[0]})"
    )


@contextmanager
def refuse_exit() -> Iterator[None]:
    """Turn a `sys.exit` in the task's code into an error; it would end one rank silently.

    Errors: TaskError: the code has called it.
    """
    try:
        yield
    except SystemExit as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise TaskError(
            "the task's code ended this process",
            expected="an exception for an error: all ranks then end, and the failure card shows it",
            found=f"sys.exit({error.code!r}) in {where.name}, {where.filename}:{where.lineno}",
        ) from error


def check_same_data(task: Task, comm: Comm) -> None:
    """Check that all ranks have the same data. Collective: yes.

    Errors: LaunchError: on every rank, if the data of one differs from rank 0's.
    """
    heldout = dataset_length(task.heldout_data, least=0) if task.heldout_data is not None else 0
    data_id = task.data_id
    if is_iterable(task.train_data) and not hasattr(task.train_data, "by_position"):
        data_id = sample_hash(IterableSamples(task.train_data, 0, 1, {})[0]) + data_id
    everyone = allgather_json(comm, [training_samples(task.train_data), heldout, data_id], name="data/same")
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise LaunchError(
                f"the data of rank {rank} differs from that of rank 0",
                expected=_described(everyone[0]),
                found=_described(theirs),
                next_step="give every host the same files (for the default data: the same Python version); make random"
                " data with torch's generator, which has the same seed on each rank",
                everywhere=True,
            )


def _described(data: list[Any]) -> str:
    samples, heldout, data_id = data
    training = str(samples) if samples else "an iterable data set of"
    return f"{training} training and {heldout} held-out samples" + (f" with hash {data_id[:12]}" if data_id else "")


def check_keeps_bits(model: nn.Module) -> None:
    """Check that the bits of a model's gradients do not depend on how micro-batches are divided among ranks.

    Errors: ConfigError: they do.
    """
    norms = [name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    for names, what, instead in (
        (norms, "batch norm", "nn.GroupNorm or nn.LayerNorm"),
        (spectral_norms(model), "spectral norm", "a model without it"),
        ([*sparse_gradients(model).values()], "sparse gradients", "nn.Embedding(sparse=False)"),
    ):
        if names:
            raise ConfigError(
                f"--train.reproducible bits does not support {what}, which {names[0]} has",
                expected=f"{instead}: gradients of a micro-batch that do not depend on other ones",
                next_step=f"use {instead}, or leave out --train.reproducible",
                everywhere=True,
            )


def spectral_norms(model: nn.Module) -> list[str]:
    """Return the names of modules with spectral norm, in the old or new form of torch: each forward pass changes it."""
    return [
        name.partition(".parametrizations.")[0]
        for name, module in model.named_modules()
        if isinstance(module, nn.utils.parametrizations._SpectralNorm)
        or any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values())
    ]
