"""Exchange plain values and errors over a Comm: JSON in uint8 tensors, never pickle."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from hvdtrain import errors
from hvdtrain.comm.base import Comm
from hvdtrain.comm.solo import ImaginedComm

T = TypeVar("T")


def broadcast_json(comm: Comm, value: Any, *, name: str, root: int = 0) -> Any:
    """Return the value of `root` on every rank. JSON must be able to hold it. Collective: yes."""
    data = _bytes(value) if _is_rank(comm, root) else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([len(data)], dtype=torch.int64)
    comm.broadcast(length, name=f"{name}/length", root=root).wait()
    if not _is_rank(comm, root):
        data = torch.empty(int(length), dtype=torch.uint8)
    return _value(comm.broadcast(data, name=name, root=root).wait())


def allgather_json(comm: Comm, value: Any, *, name: str) -> list[Any]:
    """Return the values of all ranks, in rank order. Collective: yes."""
    return [_value(part) for part in allgather_bytes(comm, _bytes(value), name=name)]


def alltoall_json(comm: Comm, values: Sequence[Any], *, name: str) -> list[Any]:
    """Send a value to each rank; return those received, in rank order. Collective: yes."""
    data = [_bytes(value) for value in values]
    lengths = torch.tensor([len(each) for each in data], dtype=torch.int64)
    received = comm.alltoall(lengths, name=f"{name}/length").wait().tolist()
    found = comm.alltoall(torch.cat(data), name=name, rows=lengths.tolist()).wait()
    return [_value(part) for part in torch.split(found, received)]


def allgather_bytes(comm: Comm, data: torch.Tensor, *, name: str) -> Sequence[torch.Tensor]:
    """Return the uint8 tensors of all ranks, in rank order; their lengths may differ. Collective: yes."""
    lengths = comm.allgather(torch.tensor([len(data)], dtype=torch.int64), name=f"{name}/length").wait().tolist()
    return torch.split(comm.allgather(data, name=name).wait(), lengths)


def on_rank_0(comm: Comm, action: Callable[[], T], *, name: str) -> T:
    """Run `action` on rank 0 and return its result, which JSON can hold, on every rank. Collective: yes.

    Errors:
        Every Exception of `action` ends the call on every rank, so that no rank waits for a result. All ranks raise
        an `HvdtrainError` with its type and texts, and an OSError as an `HvdtrainError`. Of any other error, rank 0
        raises the original; the other ranks raise an `HvdtrainError` that names its type and message.
    """
    outcome: dict[str, Any] = {}
    original: Exception | None = None
    if _is_rank(comm, 0):
        try:
            outcome = {"result": action()}
            json.dumps(outcome)  # a result that JSON cannot hold is an error of the action, on every rank
        except Exception as error:
            original, outcome = error, {"error": _describe(error)}
    outcome = broadcast_json(comm, outcome, name=name)
    if "error" not in outcome:
        return outcome["result"]  # type: ignore[no-any-return]
    if original is not None and not isinstance(original, errors.HvdtrainError | OSError):
        raise original
    raise _error(outcome["error"])


def _is_rank(comm: Comm, rank: int) -> bool:
    """Return whether this is a rank; in an imagined job, all others do what this one does."""
    return comm.rank == rank or isinstance(comm, ImaginedComm)


def _describe(error: Exception) -> dict[str, Any]:
    if isinstance(error, errors.HvdtrainError):
        known = next(kind.__name__ for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind)
        return {"type": known} | {part: getattr(error, part) for part in ("what", "expected", "found", "next_step")}
    if isinstance(error, OSError):
        return {"type": "HvdtrainError", "what": str(error)}
    return {"type": "HvdtrainError", "what": f"rank 0 failed: {type(error).__name__}: {error}", "consequence": True}


def _error(parts: dict[str, Any]) -> errors.HvdtrainError:
    kind: type[errors.HvdtrainError] = getattr(errors, parts.pop("type"))
    consequence = parts.pop("consequence", False)
    error = kind(**parts)
    error.everywhere, error.consequence = not consequence, consequence
    return error


def _bytes(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _value(data: torch.Tensor) -> Any:
    return json.loads(data.numpy().tobytes())
