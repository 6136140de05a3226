"""Measure what packing, encoding and decoding buckets cost on this machine.

``python -m hvdtrain.compression.coding_probe QUESTION ANSWER`` is for callers without torch. QUESTION is JSON:
``compression``, ``ranks``, ``threads``, and ``buckets`` of ``parts`` [[name, shape, start], ...], ``length``,
``dtype``. ANSWER becomes a JSON list with the fields of a `CodingCost` for each bucket.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvdtrain.comm.link_probe import clock_s
from hvdtrain.comm.solo import Finished, SoloComm
from hvdtrain.compression.base import BucketShape, Compressor, Part, commit_all
from hvdtrain.compression.coding_cost import CodingCost
from hvdtrain.compression.table import Compression, parse
from hvdtrain.files import write_text

_TIMES = 4


class _EchoComm(SoloComm):
    """A rank among `size` equal ones: other ranks add nothing to a sum, and send what this rank sends."""

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__()
        self.size = self.local_size = size
        self.started_s = 0.0  # of the last collective
        self._device = device

    def allreduce(self, tensor: Tensor, *, name: str) -> Finished:
        self.started_s = clock_s(self._device)
        return Finished(tensor)

    def allgather(self, tensor: Tensor, *, name: str) -> Finished:
        self.started_s = clock_s(self._device)
        return _Repeated(tensor, self.size)

    def alltoall(self, tensor: Tensor, *, name: str, rows: Sequence[int] | None = None) -> Finished:
        return self.allreduce(tensor, name=name)


@dataclass(frozen=True)
class _Repeated(Finished):
    """A gathered tensor that is made when the caller waits: no part of the rank's own cost."""

    times: int

    def wait(self) -> Tensor:
        return self.result.repeat(self.times)


def measure_coding(
    compression: Compression, shapes: Sequence[BucketShape], gradients: Sequence[Sequence[Tensor | None]], ranks: int
) -> list[CodingCost]:
    """Measure the cost of each bucket: the minimum over several steps, after one that is not counted.

    All buckets are in memory at the same time, as in training, so that none of them stays in the cache. There is at
    least one. The values of the gradients do not change.
    """
    comm = _EchoComm(ranks, shapes[0].device)
    make = compression.load()
    made = [make(shape, comm) for shape in shapes]
    outs = [compressor.make_out() for compressor in made]
    steps = [[_measure_once(comm, *one) for one in zip(made, outs, gradients, strict=True)] for _ in range(_TIMES)]
    return [CodingCost.combine(costs, min) for costs in zip(*steps[1:], strict=True)]


def _measure_once(
    comm: _EchoComm, compressor: Compressor, out: Tensor, gradients: Sequence[Tensor | None]
) -> CodingCost:
    device = compressor.shape.device
    pack_s, before_s, during_s = [], [], []
    for index, gradient in enumerate(gradients):
        if gradient is not None:
            gradient.mul_(1.0)  # into the cache, as backward leaves it
        start_s = clock_s(device)
        compressor.pack(index, gradient)
        pack_s.append(clock_s(device) - start_s)
    phases = compressor.exchange(out)
    result: Any = None
    while True:
        start_s = clock_s(device)
        try:
            handle = phases.send(result)
        except StopIteration:
            after_s = clock_s(device) - start_s
            break
        before_s.append(comm.started_s - start_s)
        during_s.append(clock_s(device) - comm.started_s)
        result = handle.wait()
    start_s = clock_s(device)
    commit_all([compressor], applied=True)
    return CodingCost(pack_s, before_s, during_s, after_s, clock_s(device) - start_s)


def answer(question: dict[str, Any]) -> list[CodingCost]:
    """Measure the buckets of a question, as the module's docstring describes it, with random gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes, gradients = [], []
    for number, bucket in enumerate(question["buckets"]):
        dtype = getattr(torch, bucket["dtype"])
        parts = tuple(Part(name, torch.Size(shape), start) for name, shape, start in bucket["parts"])
        shapes.append(BucketShape(str(number), parts, bucket["length"], dtype, torch.device("cpu")))
        gradients.append([torch.randn(part.shape, generator=generator).to(dtype) for part in parts])
    return measure_coding(parse(question["compression"]), shapes, gradients, question["ranks"])


def main(question: Path, to: Path) -> None:
    """Read the question, measure, write the answer."""
    asked = json.loads(question.read_text())
    torch.set_num_threads(asked["threads"])
    write_text(to, json.dumps([asdict(cost) for cost in answer(asked)]) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
