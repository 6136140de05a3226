"""Predict the largest micro-batch that fits every GPU, for engines with collectives in each pass."""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import torch

from hvdtrain.comm.objects import allgather_json, on_rank_0
from hvdtrain.errors import ConfigError
from hvdtrain.files import write_text
from hvdtrain.programs import run_program
from hvdtrain.training.round import Round
from hvdtrain.yaml_file import yaml_text

_GIB = 1 << 30
_COMMUNICATION_BYTES = _GIB
"""Memory that NCCL takes."""
_GAPS = 0.1
"""Fraction of the rest that is lost between blocks of memory."""


def predict_largest(current: Round, most: int) -> tuple[int, list[int]]:
    """Return the largest micro-batch up to `most` samples, and the ranks with the least memory if that limits it.

    0 if one sample does not fit. A trial like those of other engines would leave the other ranks in a collective if
    memory ran out on one.
    Collective: yes.

    Errors:
        ConfigError: the memory of the job cannot be predicted.
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
