"""Plain values and errors over a Comm: JSON in uint8 tensors, never pickle."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from hvdtrain import errors
from hvdtrain.comm.base import Comm

T = TypeVar("T")


def broadcast_json(comm: Comm, value: Any, *, name: str, root: int = 0) -> Any:
    """The value of `root`, on every rank: what JSON can hold. Collective: yes."""
    data = _bytes(value) if comm.rank == root else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([len(data)], dtype=torch.int64)
    comm.broadcast(length, name=f"{name}/length", root=root).wait()
    if comm.rank != root:
        data = torch.empty(int(length), dtype=torch.uint8)
    return _value(comm.broadcast(data, name=name, root=root).wait())


def allgather_json(comm: Comm, value: Any, *, name: str) -> list[Any]:
    """The values of all ranks, in rank order. Collective: yes."""
    data = _bytes(value)
    lengths = comm.allgather(torch.tensor([len(data)], dtype=torch.int64), name=f"{name}/length").wait().tolist()
    everything = comm.allgather(data, name=name).wait()
    return [_value(part) for part in torch.split(everything, lengths)]


def on_rank_0(comm: Comm, action: Callable[[], T], *, name: str) -> T:
    """Do `action` on rank 0 and give its result, which JSON can hold, to every rank. Collective: yes.

    Errors:
        An `HvdtrainError` or `OSError` of `action` is raised on every rank, so that all end together.
    """
    outcome: dict[str, Any] = {}
    if comm.rank == 0:
        try:
            outcome = {"result": action()}
        except (errors.HvdtrainError, OSError) as error:
            outcome = {"error": _describe(error)}
    outcome = broadcast_json(comm, outcome, name=name)
    if "error" in outcome:
        raise _error(outcome["error"])
    return outcome["result"]  # type: ignore[no-any-return]


def _describe(error: Exception) -> dict[str, str | None]:
    if isinstance(error, errors.HvdtrainError):
        return {"type": type(error).__name__} | {
            part: getattr(error, part) for part in ("what", "expected", "found", "next_step")
        }
    return {"type": "HvdtrainError", "what": str(error), "expected": None, "found": None, "next_step": None}


def _error(parts: dict[str, Any]) -> errors.HvdtrainError:
    kind: type[errors.HvdtrainError] = getattr(errors, parts.pop("type"))
    error = kind(**parts)
    error.everywhere = True
    return error


def _bytes(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _value(data: torch.Tensor) -> Any:
    return json.loads(bytes(data.tolist()))
