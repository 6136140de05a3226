"""What is exchanged together, and which thread goes first, follow from where the ranks are and from what is sent."""

from __future__ import annotations

import pytest

from hvdtrain.compression.table import parse
from hvdtrain.engine import make
from hvdtrain.engine.make import check_compression, settle_in
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
    monkeypatch.setattr(make, "give_way", asked.append)
    monkeypatch.setattr(make, "environ", lambda: {make.NICE: "7"})
    comm = ThreadComm(Hub(2), 0)
    comm.local_size = per_host
    assert settle_in(parse(compression), comm) == mib * MIB
    assert settle_in(parse(compression), comm, bucket_mib=0.5) == MIB / 2
    assert asked == ["7", "7"] * gives_way, "whatever their size"


def test_an_option_that_names_no_compression_is_told_all_that_there_are() -> None:
    check_compression("auto")
    check_compression("topk:0.1")
    with pytest.raises(ConfigError, match="'powersgd:x' is no compression") as caught:
        check_compression("powersgd:x")
    assert caught.value.expected is not None and caught.value.expected.endswith("powersgd[:rank 1 to 128], auto")
