"""What the same bits on any number of ranks need of each rank: one number of threads, and a model that keeps them."""

from __future__ import annotations

import torch
from torch import nn

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import allgather_json
from hvdtrain.engine.divisible import sparse_gradients
from hvdtrain.errors import ConfigError, LaunchError
from hvdtrain.runtime.rules import THREADS
from hvdtrain.runtime.tuning import without_our_variables
from hvdtrain.training.elastic.worker_state import WorkerState
from hvdtrain.training.start.opening import spectral_norms

_OPTION = "--train.reproducible bits"
_WITHOUT = "leave out --train.reproducible"


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
                f"{_OPTION} does not support {what}, which {names[0]} has",
                expected=f"{instead}: gradients of a micro-batch that do not depend on other ones",
                next_step=f"use {instead}, or {_WITHOUT}",
                everywhere=True,
            )


def fix_threads(worker: WorkerState, comm: Comm) -> None:
    """Give torch the number of threads of the run's first start; there, OMP_NUM_THREADS of the user, or 1.

    Collective: yes. Errors: LaunchError: a rank was started with another number; on every rank.
    """
    value = without_our_variables(worker.info.variables).get(THREADS, "").split(",")[0].strip()
    given = allgather_json(comm, int(value) if value.isdigit() else 0, name="same_bits/threads")
    progress = worker.state.progress
    threads = progress.threads or given[0] or 1
    for rank, other in enumerate(given):
        if other not in (0, threads) or (not progress.threads and other != given[0]):
            raise LaunchError(
                f"{_OPTION}, but rank {rank} was started with {THREADS}={other}",
                expected=f"{THREADS}={threads}, as " + ("since the first start" if progress.threads else "on rank 0"),
                next_step=f"unset {THREADS}, or set it to {threads} on every host"
                + ("; for another number: a new run" if progress.threads else ""),
                everywhere=True,
            )
    progress.threads = threads
    torch.set_num_threads(threads)
