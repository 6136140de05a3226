from __future__ import annotations

import pytest
import torch

from hvdtrain.comm import link_probe as link
from hvdtrain.comm.solo import SoloComm
from tests.support.thread_comm import ThreadComm, on_ranks

CPU = torch.device("cpu")


def test_every_size_where_there_is_time() -> None:
    sizes = (1 << 10, 1 << 14, 1 << 18)
    for mine in on_ranks(2, lambda comm: link.probe_link(comm, CPU, 1e9, sizes=sizes)):
        assert [size for size, _ in mine] == list(sizes) and all(seconds > 0 for _, seconds in mine)


def test_all_ranks_end_where_rank_0_does() -> None:
    def body(comm: ThreadComm) -> list[int]:
        return [size for size, _ in link.probe_link(comm, CPU, 0.0 if comm.rank == 0 else 1e9)]

    assert on_ranks(3, body) == [list(link.SIZES[:2])] * 3


def test_of_large_sizes_the_mean_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that passes something at once is fast at first."""
    for size, expected in ((1 << 10, 1.0), (1 << 22, 2.0)):
        times = iter([0.0, 9.0, 10.0, 11.0, 20.0, 23.0])
        monkeypatch.setattr(link, "clock_s", lambda device, times=times: next(times))
        assert link._allreduce_s(SoloComm(), SoloComm(), CPU, size) == expected
