"""Hashes in the journal, by which `hvdtrain replay` says in which micro-batch and tensor two runs part."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

from torch import nn

from hvdtrain.engine.base import Engine
from hvdtrain.training.diagnostics.drift import digests, replicated
from hvdtrain.training.loop.step_part import StepPart

MOST_PASSES = 64
"""Hashes of passes in the line of a step."""


def pass_hashes(numbers: Sequence[Sequence[float]]) -> str:
    """Return a hash of the loss and the weight of each pass, by position: eight hexadecimal digits each.

    If a step has more than `MOST_PASSES`, neighbours have one together, equally many except in the last.
    """
    each = -(-len(numbers) // MOST_PASSES)
    rows = [array("d", row).tobytes() for row in numbers]
    return "".join(f"{crc32(b''.join(rows[first : first + each])):08x}" for first in range(0, len(rows), each))


class ParameterHashes(StepPart):
    """Records after every `every` steps a hash of each tensor that all ranks have, eight hexadecimal digits each.

    Args:
        record: records an event; None on ranks that do not record.
    """

    def __init__(self, every: int, model: nn.Module, engine: Engine, record: Callable[[Any], None] | None) -> None:
        self._every, self._model, self._engine, self._record = every, model, engine, record
        self._names: list[str] = []

    def finish(self, step: int, *, applied: bool) -> None:
        """Record those after step `step`, if it is their turn; with the names, where these are others than before."""
        if step % self._every:
            return
        self._engine.complete()
        tensors = replicated(self._model)
        if self._record is None or not tensors:
            return
        names, self._names = self._names, [*tensors]
        facts = {} if names == self._names else {"names": self._names}
        hashes = "".join(f"{number & 0xFFFFFFFF:08x}" for number in digests(tensors.values()).tolist())
        self._record({"event": "parameters", "at_step": step, **facts, "hashes": hashes})
