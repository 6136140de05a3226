"""``python -m hvdtrain.exchange.coding_probe ASKED ANSWER``: what packing, coding and decoding cost here.

ASKED is JSON: ``compression``, ``ranks``, ``threads``, and ``buckets`` of ``parts`` [[name, shape, start], ...],
``length``, ``dtype``. ANSWER gets, for each bucket, seconds of the training thread: ``pack_s`` of each gradient, still
in the cache as backward leaves it; ``before_s`` and ``during_s`` of each collective, until it is handed over and what
is done then; ``after_s``; ``commit_s``.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvdtrain.comm.solo import SoloComm
from hvdtrain.compression.base import BucketShape, Compressor, Part
from hvdtrain.compression.table import parse
from hvdtrain.durable import write_text

_TIMES = 4


class _Echo(SoloComm):
    """One rank that stands for `size` equal ones, and notes when a collective was handed over."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.local_size = size
        self.handed_s = 0.0

    def allreduce(self, tensor: Tensor, *, name: str) -> Any:
        """Sum over ranks: of others, nothing."""
        self.handed_s = time.perf_counter()
        return _Given(tensor)

    def allgather(self, tensor: Tensor, *, name: str) -> Any:
        """What each gives is what this one gives."""
        self.handed_s = time.perf_counter()
        return _Given(tensor, self.size)

    def alltoall(self, tensor: Tensor, *, name: str, splits: list[int] | None = None) -> Any:
        """What comes is what was sent."""
        self.handed_s = time.perf_counter()
        return _Given(tensor)


class _Given:
    def __init__(self, tensor: Tensor, times: int = 1) -> None:
        self._tensor = tensor
        self._times = times

    def done(self) -> bool:
        return True

    def wait(self) -> Tensor:
        return self._tensor if self._times == 1 else self._tensor.repeat(self._times)


def costs(compression: str, ranks: int, buckets: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each bucket, the least of some times. All are there at once, as in training: none is in the cache."""
    made: list[tuple[Compressor, Tensor, list[Tensor]]] = []
    comm = _Echo(ranks)
    generator = torch.Generator().manual_seed(0)
    for number, bucket in enumerate(buckets):
        dtype = getattr(torch, bucket["dtype"])
        parts = tuple(Part(name, torch.Size(shape), start) for name, shape, start in bucket["parts"])
        shape = BucketShape(str(number), parts, bucket["length"], dtype, torch.device("cpu"))
        compressor = parse(compression).load()(shape, comm)
        gradients = [torch.randn(part.shape, generator=generator).to(dtype) for part in parts]
        work = compressor.work
        in_place = not compressor.keeps_error and work.dtype == dtype and len(work) == shape.length
        made.append((compressor, work if in_place else shape.zeros(), gradients))
    rounds = [[_once(comm, *one) for one in made] for _ in range(_TIMES)]
    return [_least([found[number] for found in rounds[1:]]) for number in range(len(buckets))]


def _once(comm: _Echo, compressor: Compressor, out: Tensor, gradients: list[Tensor]) -> dict[str, Any]:
    pack_s, before_s, during_s = [], [], []
    for index, gradient in enumerate(gradients):
        gradient.mul_(1.0)  # backward has just written it
        start = time.perf_counter()
        compressor.pack(index, gradient)
        pack_s.append(time.perf_counter() - start)
    phases = compressor.exchange(out)
    result: Any = None
    while True:
        comm.handed_s = 0.0
        start = time.perf_counter()
        try:
            handle = phases.send(result)
        except StopIteration:
            after_s = time.perf_counter() - start
            break
        end = time.perf_counter()
        before_s.append(comm.handed_s - start)
        during_s.append(end - comm.handed_s)
        result = handle.wait()
    start = time.perf_counter()
    compressor.finite()
    compressor.commit(applied=True)
    commit_s = time.perf_counter() - start
    return {"pack_s": pack_s, "before_s": before_s, "during_s": during_s, "after_s": after_s, "commit_s": commit_s}


def _least(found: list[dict[str, Any]]) -> dict[str, Any]:
    def of(key: str) -> Any:
        values = [one[key] for one in found]
        return [min(column) for column in zip(*values, strict=True)] if isinstance(values[0], list) else min(values)

    return {key: of(key) for key in found[0]}


def main(asked: Path, answer: Path) -> None:
    """Measure."""
    question = json.loads(asked.read_text())
    torch.set_num_threads(question["threads"])
    write_text(answer, json.dumps(costs(question["compression"], question["ranks"], question["buckets"])) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
