"""Parameters that are not stored row-major train as those that are; ranks are threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hvdtrain import Task
from hvdtrain.config.schema import OptimizerConfig
from hvdtrain.errors import TaskError
from hvdtrain.training.start.fused import why_not_fused
from hvdtrain.training.start.optimizers import make_optimizer, move_optimizer_state
from tests.support.thread_job import train_on_threads

OPTIONS = ("--train.global_batch=4", "--train.micro_batch=2", "--train.steps=6", "--optimizer.warmup_steps=0")

LR = {"adamw": 0.02, "sgd": 0.3, "adafactor": 0.05}


class Turned(nn.Module):
    """A convolution and products by a square matrix and by a thin one."""

    def __init__(self, *, turned: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.square = nn.Parameter(torch.randn(16, 16) / 4)
        self.thin = nn.Parameter(torch.randn(16, 2))
        if turned:
            self.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self.square = nn.Parameter(self.square.detach().t().contiguous().t())

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = torch.tanh(self.conv(x)).mean(1).flatten(1) @ self.square
        return torch.tanh(hidden) @ self.thin


def _task(_rank: int, *, turned: bool) -> Task:
    torch.manual_seed(1)
    model = Turned(turned=turned)
    data = TensorDataset(torch.randn(40, 3, 6, 6), torch.randn(40, 2))

    def loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, float]:
        return (model(batch[0]) - batch[1]).pow(2).sum(), float(len(batch[0]))

    return Task(model, loss, data)


def _trained(folder: Path, *options: str, size: int, turned: bool) -> list[dict[str, Tensor]]:
    found = train_on_threads(*OPTIONS, f"--run_dir={folder}", *options, size=size, build=partial(_task, turned=turned))
    return [result.model.state_dict() for result in found]


@pytest.mark.parametrize(
    ("size", "compression", "optimizer"),
    [
        (1, "none", "adamw"),
        (2, "none", "adamw"),
        (3, "none", "sgd"),
        (2, "none", "adafactor"),
        (2, "fp16", "sgd"),
        (2, "int8", "sgd"),
    ],
)
def test_strides_change_nothing(size: int, compression: str, optimizer: str, tmp_path: Path) -> None:
    """Also after a resume, for which the state of the optimizer is read from a file."""
    options = (
        f"--optimizer.name={optimizer}",
        f"--parallel.compression={compression}",
        f"--optimizer.lr={LR[optimizer]}",
    )
    tolerance = 1e-4 if compression == "none" else 1e-2
    expected = _trained(tmp_path / "row-major", *options, size=size, turned=False)
    _trained(tmp_path / "turned", *options, "--train.stop_at=3", size=size, turned=True)
    for found in _trained(tmp_path / "turned", *options, size=size, turned=True):
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[0][name], rtol=1e-4, atol=tolerance)


def test_an_update_in_one_pass_over_memory_needs_parameters_that_fill_theirs() -> None:
    assert make_optimizer(Turned(turned=False), OptimizerConfig()).defaults["fused"]
    model = Turned(turned=True)
    assert make_optimizer(model, OptimizerConfig()).defaults["fused"]
    model.thin = nn.Parameter(torch.zeros(16, 7)[:, :2])
    assert not make_optimizer(model, OptimizerConfig()).defaults["fused"]


def _updated(parameter: Tensor, gradient: Tensor, *, fused: bool) -> Tensor:
    """Three steps of AdamW; the change of the parameter."""
    optimizer = torch.optim.AdamW([own := nn.Parameter(parameter)], lr=0.1, fused=fused, foreach=False)
    for _ in range(3):
        own.grad = gradient
        optimizer.step()
    return own.detach()


@pytest.mark.parametrize(
    ("make", "is_right"),
    [
        (lambda: torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last), True),
        (lambda: torch.randn(4, 6).t(), True),
        (lambda: torch.randn(4, 3, 2).permute(2, 0, 1), True),
        (lambda: torch.randn(8, 6)[:, ::2], False),
        (lambda: torch.randn(8, 6)[:, 1:4], False),
    ],
    ids=["channels last", "transposed", "permuted", "every second column", "some columns"],
)
def test_fused_kernels_are_right_where_parameters_fill_their_memory(make: Callable[[], Tensor], is_right: bool) -> None:
    """torch's own kernels, on a CPU: they ignore strides. A gradient of the parameter's strides is needed, too."""
    torch.manual_seed(0)
    start = make()
    gradient = torch.empty_like(start).copy_(torch.randn(start.shape))
    fused, plain = (_updated(_copy_of_memory(start), gradient, fused=fused) for fused in (True, False))
    assert torch.allclose(fused, plain, atol=1e-5) is is_right
    named = [("weight", nn.Parameter(start))]
    assert (why_not_fused(named) == "") is is_right
    if is_right and gradient.stride() != (row_major := gradient.contiguous()).stride():
        assert not torch.allclose(_updated(_copy_of_memory(start), row_major, fused=True), plain, atol=1e-5)


def _copy_of_memory(tensor: Tensor) -> Tensor:
    """Copy the whole memory of a tensor, so that its strides stay."""
    memory = tensor.untyped_storage().clone()
    return torch.empty(0).set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload]


def test_an_optimizer_that_is_not_fused_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ours is changed with a warning that names the parameter; that of a task is refused, because it would be wrong."""

    def build(rank: int, *, fused: bool | None = None) -> Task:
        task = _task(rank, turned=True)
        task.model.thin = nn.Parameter(torch.zeros(16, 7)[:, :2])
        if fused is None:
            return task
        optimizer = torch.optim.SGD(task.model.parameters(), fused=fused)
        return Task(task.model, task.loss, task.train_data, optimizer=optimizer)

    options = (*OPTIONS, "--train.stop_at=1")
    train_on_threads(*options, f"--run_dir={tmp_path / 'ours'}", size=1, build=build)
    assert "takes longer: thin of shape (16, 2) and strides (7, 1) does not fill" in capsys.readouterr().out
    train_on_threads(*options, f"--run_dir={tmp_path / 'plain'}", size=1, build=partial(build, fused=False))
    assert "takes longer" not in capsys.readouterr().out
    with pytest.raises(TaskError, match=r"SGD\(fused=True\), but thin of shape"):
        train_on_threads(*options, f"--run_dir={tmp_path / 'fused'}", size=1, build=partial(build, fused=True))


@pytest.mark.parametrize(
    ("make", "moved"),
    [
        (lambda p: torch.optim.Adagrad(p), {"sum": "meta", "step": "cpu"}),
        (lambda p: torch.optim.AdamW(p, capturable=True), {"exp_avg": "meta", "step": "meta"}),
    ],
    ids=["counts on the host", "counts beside"],
)
def test_the_state_of_an_optimizer_is_where_its_parameters_are(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], moved: dict[str, str]
) -> None:
    """The meta device represents one that a model was moved to after its optimizer was created."""
    parameter = nn.Parameter(torch.zeros(3, device="meta"))
    optimizer = make([parameter])
    optimizer.state[parameter] = {name: torch.zeros(()) for name in moved} | {"plain": 3}
    move_optimizer_state(optimizer)
    state = optimizer.state[parameter]
    assert {name: value.device.type for name, value in state.items() if name != "plain"} == moved
    assert state["plain"] == 3
