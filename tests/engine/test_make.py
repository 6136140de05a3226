"""The size of buckets and the priority of threads follow from the hosts of the ranks and from the compression."""

from __future__ import annotations

import pytest
import torch

from hvdtrain.compression.sizes import Bucket
from hvdtrain.compression.table import TABLE, parse
from hvdtrain.engine import make
from hvdtrain.engine.make import prepare_exchange, resolve_compression
from hvdtrain.engine.table import check_compression
from hvdtrain.errors import ConfigError
from tests.support.thread_comm import Hub, ThreadComm

MIB = 1 << 20


@pytest.mark.parametrize(
    ("compression", "per_host", "mib", "gives_way"),
    [
        ("none", 2, 32, False),
        ("none", 1, 8, True),
        ("fp16", 2, 32, False),
        ("fp16", 1, 2, True),
        ("int8", 1, 8, True),
        ("powersgd:4", 1, 8, False),
        ("topk", 1, 8, False),
    ],
)
def test_buckets_and_priority(
    compression: str, per_host: int, mib: int, gives_way: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(make, "lower_own_priority", asked.append)
    comm = ThreadComm(Hub(2), 0)
    comm.local_size = per_host
    variables = {make.NICE: "7"}
    assert prepare_exchange(parse(compression), comm, variables) == mib * MIB
    assert prepare_exchange(parse(compression), comm, variables, bucket_mib=0.5) == MIB / 2
    assert asked == ["7", "7"] * gives_way, "whatever their size"


def test_an_unknown_compression_lists_all_names() -> None:
    check_compression("auto")
    check_compression("topk:0.1")
    with pytest.raises(ConfigError, match="powersgd:x") as caught:
        check_compression("powersgd:x")
    assert all(name in str(caught.value.expected) for name in (*TABLE, "auto"))


@pytest.mark.parametrize(
    ("environ", "device", "halves"),
    [
        ({"HOROVOD_RANK": "0", "HOROVOD_CPU_OPERATIONS": "gloo"}, "cpu", False),
        ({"HOROVOD_RANK": "0", "HOROVOD_CPU_OPERATIONS": "gloo"}, "cuda", True),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "cpu", True),
        ({"HVDTRAIN_CHANNEL": "3"}, "cpu", False),
    ],
)
def test_gloo_on_cpus_sums_no_halves(environ: dict[str, str], device: str, halves: bool) -> None:
    for name in ("fp16", "topk:0.1"):
        found = resolve_compression(name, torch.device(device), environ)
        assert found.halves == halves and str(found) == name
        assert found.exact_rows == (not halves)
    payload = resolve_compression("fp16", torch.device(device), environ).payload(Bucket([(640,)], "float32", 640), 2)
    assert ("allreduce" in payload) == halves
