"""On a GPU the shards of all ranks are processed at once, so that few kernels start; here the same code on a CPU."""

from __future__ import annotations

import pytest
import torch

from hvdtrain.compression import base
from hvdtrain.compression.table import TABLE, parse
from tests.support.compression import bucket, drive, gradients, operations
from tests.support.thread_comm import ThreadComm, on_ranks

SHAPE = bucket(((400, 300), (7,), (90, 30)))
SHARES = (0.4, 0.02, 1e-5)
"""For each coding of places: bitmap, int16, int32."""
NAMES = [*TABLE, *(f"topk:{share}" for share in SHARES)]


@pytest.mark.parametrize("name", NAMES)
def test_the_number_of_operations_does_not_depend_on_the_number_of_ranks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = (2, 4) if name == f"topk:{SHARES[0]}" else (2, 8)  # bitmaps take much memory: those of 4 ranks at once
    if name in ("int8", "topk"):
        assert len({operations(parse(name), SHAPE, size) for size in sizes}) == 2, "one rank after another"
    monkeypatch.setattr(base, "processes_at_once", lambda device: True)
    assert len({operations(parse(name), SHAPE, size) for size in sizes}) == 1


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "int8-stochastic"])
def test_the_sums_are_those_of_one_rank_after_another(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(comm: ThreadComm) -> torch.Tensor:
        compressor = parse(name).load()(SHAPE, comm)
        for index, value in enumerate(gradients(SHAPE, comm.rank)):
            compressor.pack(index, value, 0.5)
        out = drive(compressor, SHAPE.zeros())
        assert base.is_finite(*base.Figures([compressor]).read())
        return torch.cat([out, compressor.work.float()])

    expected = on_ranks(size, body)
    monkeypatch.setattr(base, "processes_at_once", lambda device: True)
    torch.use_deterministic_algorithms(True)  # a CPU's threads add in any order, unlike a GPU's sort
    try:
        found = on_ranks(size, body)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(out[: SHAPE.length], found[0][: SHAPE.length]) for out in found), "equal bits on all ranks"
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_device_is_read_once_for_all_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each conversion of a tensor to numbers is a wait of the host."""
    reads: list[str] = []
    for name in ("tolist", "item", "__bool__", "__float__", "__int__"):
        before = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, b=before, n=name: (reads.append(n), b(self))[1])

    def body(comm: ThreadComm) -> None:
        compressors = [parse(name).load()(SHAPE, comm) for name in TABLE]
        for compressor in compressors:
            for index, value in enumerate(gradients(SHAPE, comm.rank)):
                compressor.pack(index, value, 0.5)
            drive(compressor, SHAPE.zeros())
        reads.clear()
        base.commit_all(compressors, applied=True)
        assert reads == ["tolist"]

    on_ranks(1, body)
