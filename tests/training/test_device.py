"""Which CUDA device a rank gets, and ranks that would share one; torch's facts about devices are made up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hvdtrain.comm.base import Comm
from hvdtrain.errors import ConfigError, LaunchError
from hvdtrain.training.start.device import check_device_is_own, pick_device
from tests.support.thread_comm import on_ranks

CUDA = torch.device("cuda", 0)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them; all ranks see the first alone once they have chosen."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-1"))


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize(
    ("wanted", "rank", "index"), [("auto", 1, 1), ("cuda", 1, 1), ("shared", 1, 1), ("shared", 2, 0)]
)
def test_a_rank_gets_the_device_of_its_local_rank(wanted: str, rank: int, index: int) -> None:
    assert pick_device(wanted, rank, 3) == torch.device("cuda", index)


@pytest.mark.usefixtures("devices")
def test_more_ranks_than_devices_are_refused() -> None:
    with pytest.raises(LaunchError, match="more ranks than CUDA devices") as error:
        pick_device("cuda", 2, 3)
    assert "--parallel.device shared" in str(error.value)


@pytest.mark.parametrize("wanted", ["cuda", "shared"])
def test_no_device_is_an_error(wanted: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ConfigError, match=f"--parallel.device {wanted}, but torch finds no CUDA device"):
        pick_device(wanted, 0, 1)


@pytest.mark.usefixtures("devices")
def test_ranks_share_a_device_only_where_they_may() -> None:
    def check(comm: Comm) -> None:
        with pytest.raises(LaunchError, match="ranks 0 and 1 would share a CUDA device"):
            check_device_is_own(CUDA, comm)
        assert not getattr(comm, "through_host", False)
        warning = check_device_is_own(CUDA, comm, may_share=True)
        assert "ranks 0 and 1 share a CUDA device" in warning and "by MPI or Gloo" in warning
        assert comm.through_host  # type: ignore[attr-defined]

    on_ranks(2, check)


@pytest.mark.usefixtures("devices")
def test_one_rank_has_its_device_alone() -> None:
    def check(comm: Comm) -> None:
        assert check_device_is_own(CUDA, comm, may_share=True) == ""
        assert check_device_is_own(torch.device("cpu"), comm) == ""

    on_ranks(1, check)
