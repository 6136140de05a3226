"""torch's switches: TF32 in all that has it, and deterministic kernels. No GPU is needed to see them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.backends import cuda, cudnn, mkldnn

from hvdtrain.training.start.kernels import allows_tf32, set_tf32, use_deterministic_kernels
from tests.support.gallery import TOY, Recorded

CUDA = torch.device("cuda", 0)
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
