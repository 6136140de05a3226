"""Check at the start that all ranks have the same model and optimizer; name the difference instead of hanging."""

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
    """Check that parameters, buffers and optimizer groups are the same on all ranks. Collective: yes.

    It compares names, order, shapes, dtypes and requires_grad. If all are equal, only a digest of each rank is sent.
    Learning rates and similar values may differ: those of rank 0 are used.

    Errors:
        LaunchError: on every rank, with the first difference and its rank.
    """
    mine = list(_facts(model, optimizer))
    digest = hashlib.sha256(json.dumps(mine).encode()).digest()
    everyone = comm.allgather(torch.frombuffer(bytearray(digest), dtype=torch.uint8)[None], name="same/digest").wait()
    if bool((everyone == everyone[0]).all()):
        return
    expected = broadcast_json(comm, mine, name="same/facts")
    for rank, difference in enumerate(allgather_json(comm, _difference(expected, mine), name="same/difference")):
        if difference is not None:
            name, there, here = difference
            error = LaunchError(
                f"the model of rank {rank} is not that of rank 0: {name} differs",
                expected=f"{there} as on rank 0",
                found=here,
                next_step="build model and optimizer only from the config, the same way on every rank and host",
            )
            error.everywhere = True
            raise error


def _facts(model: nn.Module, optimizer: Optimizer) -> Iterator[list[str]]:
    """Yield pairs of a name and its value that must be equal; those that explain others come first."""
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
        # Sorted: a program may take them from a set.
        members = sorted(names.get(parameter, "a parameter outside the model") for parameter in group["params"])
        yield [f"the optimizer's group {number}", f"{len(members)} parameter(s): {_shortened(members)}"]
        options = sorted(str(option) for option in group if option != "params")
        yield [f"the set of options in the optimizer's group {number}", ", ".join(options)]


def _tensor(tensor: Tensor) -> str:
    return f"of shape {tuple(tensor.shape)} and dtype {str(tensor.dtype).removeprefix('torch.')}"


def _shortened(names: list[str]) -> str:
    """Return a few names, and a digest of all."""
    digest = hashlib.sha256(json.dumps(names).encode()).hexdigest()[:12]
    return f"{', '.join(names[:3])}{', ...' if names[3:] else ''} (digest of all: {digest})"


def _difference(rank_0: list[list[str]], mine: list[list[str]]) -> list[Any] | None:
    """Return the first difference: its name, the value on rank 0, and the value here."""
    theirs, ours = ({name: value for name, value in facts} for facts in (rank_0, mine))  # noqa: C416
    for name in dict.fromkeys([*theirs, *ours]):
        if theirs.get(name) != ours.get(name):
            return [name, theirs.get(name, _ABSENT), ours.get(name, _ABSENT)]
    return None
