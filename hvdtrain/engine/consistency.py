"""Seeing at the start that all ranks train one model by one optimizer: what differs is named, and nothing hangs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import allgather_json, broadcast_json
from hvdtrain.errors import LaunchError

_ABSENT = "none"


def check_same(model: nn.Module, optimizer: Optimizer, comm: Comm) -> None:
    """See that names, order, shapes, dtypes, what is trained, buffers and groups are those of rank 0. Collective: yes.

    What it costs does not depend on the model where all is well: a digest of each rank travels. Learning rates and the
    like may differ: rank 0's are taken over.

    Errors:
        LaunchError: on every rank, with the first thing that differs, and where.
    """
    mine = list(_facts(model, optimizer))
    digest = hashlib.sha256(json.dumps(mine).encode()).digest()
    everyone = comm.allgather(torch.frombuffer(bytearray(digest), dtype=torch.uint8)[None], name="same/digest").wait()
    if bool((everyone == everyone[0]).all()):
        return
    wanted = broadcast_json(comm, mine, name="same/facts")
    for rank, found in enumerate(allgather_json(comm, _difference(wanted, mine), name="same/difference")):
        if found is not None:
            what, expected, there = found
            error = LaunchError(
                f"the model of rank {rank} is not that of rank 0: {what} differs",
                expected=f"{expected} as on rank 0",
                found=there,
                next_step="build model and optimizer from the config alone, the same on every rank and host",
            )
            error.everywhere = True
            raise error


def _facts(model: nn.Module, optimizer: Optimizer) -> Iterator[list[str]]:
    """What has to be the same: pairs of what it is about and how it is, those that explain others first."""
    names = {}
    for name, parameter in model.named_parameters():
        names[parameter] = name
        trained = "" if parameter.requires_grad else ", not trained"
        yield [name, f"a parameter {_tensor(parameter)}{trained}"]
    for name, buffer in model.named_buffers():
        yield [name, f"a buffer {_tensor(buffer)}"]
    yield ["the order of the model's parameters", _shortened(list(names.values()))]
    yield ["the optimizer", f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"]
    for number, group in enumerate(optimizer.param_groups):
        # In any order: a program may have them from a set.
        held = sorted(names.get(parameter, "one that is not the model's") for parameter in group["params"])
        yield [f"the optimizer's group {number}", f"{len(held)} parameter(s): {_shortened(held)}"]
        options = sorted(str(option) for option in group if option != "params")
        yield [f"what the optimizer's group {number} has beside parameters", ", ".join(options)]


def _tensor(tensor: Tensor) -> str:
    return f"of shape {tuple(tensor.shape)} and dtype {str(tensor.dtype).removeprefix('torch.')}"


def _shortened(names: list[str]) -> str:
    """A few names, and a digest that stands for all of them."""
    digest = hashlib.sha256(json.dumps(names).encode()).hexdigest()[:12]
    return f"{', '.join(names[:3])}{', ...' if names[3:] else ''} (digest of all: {digest})"


def _difference(wanted: list[list[str]], mine: list[list[str]]) -> list[Any] | None:
    """What differs first, how rank 0 has it, how this rank has it."""
    theirs, ours = ({what: how for what, how in facts} for facts in (wanted, mine))  # noqa: C416
    for what in dict.fromkeys([*theirs, *ours]):
        if theirs.get(what) != ours.get(what):
            return [what, theirs.get(what, _ABSENT), ours.get(what, _ABSENT)]
    return None
