"""Which CUDA device a rank gets, and torch's switches; torch's facts about devices are made up."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.backends import cuda, cudnn, mkldnn

import hvdtrain
from hvdtrain.comm.base import Comm
from hvdtrain.errors import ConfigError, LaunchError
from hvdtrain.training import session
from hvdtrain.training.start.device import (
    allows_tf32,
    check_device_is_own,
    pick_device,
    set_tf32,
    training_stream,
    use_deterministic_kernels,
)
from tests.support.gallery import TOY, Recorded
from tests.support.thread_comm import on_ranks
from tests.support.toy import toy

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


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
@pytest.mark.parametrize(
    ("seen", "indices"),
    [
        ("AB AB CD CD", [0, 1, 0, 1]),  # a socket each, in blocks
        ("AB CD AB CD", [0, 0, 1, 1]),  # in turn
        ("AB AB C", [0, 1, 0]),
        ("A B", [0, 0]),
    ],
)
def test_ranks_that_see_the_same_devices_share_them_out(
    seen: str, indices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = threading.local()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(own.seen))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=own.seen[index]))

    def pick(comm: Comm) -> int:
        own.seen = seen.split()[comm.rank]
        return int(pick_device("auto", comm.rank, comm.size, comm).index or 0)

    assert on_ranks(len(indices), pick) == indices


@pytest.mark.usefixtures("devices")
def test_a_rank_without_devices_beside_others_is_refused_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would train on its CPU, and the others would wait for it."""
    own = threading.local()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: own.rank != 1)

    def pick(comm: Comm) -> None:
        own.rank = comm.rank
        with pytest.raises(LaunchError, match=r"others see none(?s:.*)rank 1 "):
            pick_device("auto", comm.rank, comm.size, comm)

    on_ranks(3, pick)


@pytest.mark.parametrize("wanted", ["cuda", "shared"])
def test_no_device_or_fewer_than_ranks_are_an_error(
    wanted: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=f"--parallel.device {wanted}"):
        pick_device(wanted, 0, 1)
    request.getfixturevalue("devices")
    with pytest.raises(LaunchError, match="more ranks") if wanted == "cuda" else nullcontext():
        pick_device(wanted, 2, 3)


@pytest.mark.usefixtures("devices")
def test_ranks_share_a_device_only_where_they_may() -> None:
    def check(comm: Comm) -> None:
        with pytest.raises(LaunchError, match="ranks 0 and 1 would share a CUDA device"):
            check_device_is_own(CUDA, comm)
        assert not getattr(comm, "through_host", False)
        assert "ranks 0 and 1 share a CUDA device" in check_device_is_own(CUDA, comm, may_share=True)
        assert comm.through_host  # type: ignore[attr-defined]

    on_ranks(2, check)
    (alone,) = on_ranks(1, lambda comm: [check_device_is_own(CUDA, comm), check_device_is_own(CPU, comm)])
    assert alone == ["", ""]


class FakeStream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens to the default stream and to a new one."""
    log: list[str] = []
    current = [FakeStream("default", log)]

    @contextmanager
    def use(stream: FakeStream) -> Iterator[None]:
        current.append(stream)
        try:
            yield
        finally:
            current.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream("own", log))
    monkeypatch.setattr(torch.cuda, "stream", use)
    return log


@pytest.mark.parametrize("fails", [False, True])
def test_training_has_a_stream_of_its_own(fails: bool, streams: list[str]) -> None:
    """And the next round waits for what a failed one left."""
    with pytest.raises(RuntimeError, match="a rank is lost") if fails else nullcontext(), training_stream(CUDA):
        streams.append(f"on {torch.cuda.current_stream(CUDA).name}")  # type: ignore[attr-defined]
        if fails:
            raise RuntimeError("a rank is lost")
    assert streams == ["own waits for default", "on own", "default waits for own"]


@pytest.mark.usefixtures("streams")
def test_the_first_error_of_a_device_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(self: FakeStream, other: FakeStream) -> None:
        if self.name == "default":
            raise RuntimeError("CUDA error")

    monkeypatch.setattr(FakeStream, "wait_stream", wait)
    with pytest.raises(RuntimeError, match="device fault"), training_stream(CUDA):
        raise RuntimeError("device fault")


def test_all_of_a_round_runs_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    active = [False]

    @contextmanager
    def stream(device: torch.device) -> Iterator[None]:
        active[0] = True
        yield
        active[0] = False

    def loss(model: torch.nn.Module, batch: object) -> object:
        assert active[0], "a forward pass on the default stream"
        return task.loss(model, batch)

    task = toy()
    monkeypatch.setattr(session, "training_stream", stream)
    options = {"train": {"steps": 2, "global_batch": 2, "micro_batch": 2, "eval_samples": 2}, "run_dir": str(tmp_path)}
    hvdtrain.train(options, replace(task, loss=loss))
    assert not active[0]


NEWER = hasattr(torch.backends, "fp32_precision")
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@pytest.fixture(autouse=True)
def switches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Those of a new process, afterwards too."""
    monkeypatch.setenv(WORKSPACE, "")  # so that it is as before in the end
    monkeypatch.delenv(WORKSPACE)
    yield
    torch.set_float32_matmul_precision("highest")
    cudnn.allow_tf32 = True
    torch.use_deterministic_algorithms(False)
    cudnn.benchmark = False


def _switches() -> tuple[str, bool, bool]:
    """The older ones; reading them is an error of torch if they and the newer ones differ."""
    return torch.get_float32_matmul_precision(), cuda.matmul.allow_tf32, cudnn.allow_tf32


@pytest.mark.parametrize("choice", ["on", "off"])
def test_tf32_is_for_products_and_convolutions_alike(choice: str) -> None:
    set_tf32("on" if choice == "off" else "off", CUDA)
    set_tf32(choice, CUDA)
    on = choice == "on"
    assert _switches() == ("high" if on else "highest", on, on) and allows_tf32() is on
    if NEWER:
        found = {cuda.matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision}  # type: ignore[attr-defined]
        assert {value == "tf32" for value in found} == {on}


@pytest.mark.parametrize(("choice", "device"), [("auto", CUDA), ("on", torch.device("cpu"))])
def test_other_choices_change_nothing(choice: str, device: torch.device) -> None:
    """Nor are products on CPUs rounded, which a switch of torch can do."""
    before = _switches(), mkldnn.matmul.fp32_precision if NEWER else ""  # type: ignore[attr-defined]
    set_tf32(choice, device)
    assert (_switches(), mkldnn.matmul.fp32_precision if NEWER else "") == before  # type: ignore[attr-defined]


@pytest.mark.skipif(not NEWER, reason="torch below 2.9 has the older switches only")
def test_tf32_of_a_task_by_the_newer_switch_is_seen() -> None:
    """Where torch refuses to read the older one."""
    cuda.matmul.fp32_precision = "tf32"  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError):
        _switches()
    assert allows_tf32()


def test_deterministic_kernels_are_chosen_before_the_device(
    trained: Callable[..., Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run folder has the options, and a warning about the one that does nothing here."""
    seen: list[object] = []
    cudnn.benchmark = True

    def pick_device(*arguments: object) -> torch.device:
        seen.extend((os.environ.get(WORKSPACE), torch.are_deterministic_algorithms_enabled(), cudnn.benchmark))
        seen.append(getattr(torch._inductor.config, "deterministic", True))  # of this thread
        return torch.device("cpu")

    monkeypatch.setattr("hvdtrain.training.session.pick_device", pick_device)
    options = (*TOY, "--train.steps=1", "--train.deterministic=true", "--train.tf32=on")
    run = trained("one", *options, size=1)
    assert seen == [":4096:8", True, False, True]
    assert "deterministic: true" in (run.run / "config.yaml").read_text()
    assert any("tf32 on" in event["text"] for event in run.events("warning"))


def test_a_workspace_of_the_user_is_kept() -> None:
    use_deterministic_kernels({WORKSPACE: ":16:8"})
    assert os.environ[WORKSPACE] == ":16:8"
