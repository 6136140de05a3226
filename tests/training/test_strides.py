"""Parameters that are not stored row-major train as those that are; also complex and sparse ones; ranks are threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hvdtrain import Task
from hvdtrain.config.schema import OptimizerConfig
from hvdtrain.errors import ConfigError, TaskError
from hvdtrain.training.start.optimizers import make_optimizer, move_optimizer_state, why_not_fused
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
    [(1, "none", "adamw"), (3, "none", "sgd"), (2, "none", "adafactor"), (2, "fp16", "sgd"), (2, "int8", "sgd")],
)
@pytest.mark.some(2)
def test_strides_change_nothing(size: int, compression: str, optimizer: str, tmp_path: Path) -> None:
    """Also after a resume, for which the state of the optimizer is read from a file."""
    how = {"optimizer.name": optimizer, "optimizer.lr": LR[optimizer], "parallel.compression": compression}
    options = [f"--{name}={value}" for name, value in how.items()]
    tolerance = 1e-4 if compression == "none" else 1e-2
    expected = _trained(tmp_path / "row-major", *options, size=size, turned=False)
    _trained(tmp_path / "turned", *options, "--train.stop_at=3", size=size, turned=True)
    for found in _trained(tmp_path / "turned", *options, size=size, turned=True):
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[0][name], rtol=1e-4, atol=tolerance)


class Kinds(nn.Module):
    """A filter of complex numbers, and an embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(30, 8, sparse=True)
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.out = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(torch.fft.irfft(torch.fft.rfft(self.words(x)) * self.filter, n=8))
        return found


def _kinds(_rank: int, own: Callable[[nn.Module], torch.optim.Optimizer] | None = None) -> Task:
    torch.manual_seed(1)
    model = Kinds()
    data = TensorDataset(torch.randint(0, 30, (40, 3)), torch.randn(40, 2))
    optimizer = None if own is None else own(model)
    return Task(model, lambda m, b: ((m(b[0]) - b[1]).pow(2).sum(), float(len(b[0]))), data, optimizer=optimizer)


@pytest.mark.parametrize(
    ("own", "options"),
    [
        (None, ()),
        (None, ("--parallel.compression=int8",)),
        (lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True), ()),
    ],
    ids=["sgd", "int8", "nesterov"],
)
@pytest.mark.some(1)
def test_complex_parameters_and_sparse_gradients(own: Any, options: tuple[str, ...], tmp_path: Path) -> None:
    """One rank trains as two do, and a resumed run as an uninterrupted one, bit for bit. SGD's momentum is sparse."""

    def trained(name: str, size: int, *more: str) -> dict[str, Tensor]:
        given = (*OPTIONS, "--optimizer.name=sgd", "--checkpoint.every=3", f"--run_dir={tmp_path / name}", *options)
        return train_on_threads(*given, *more, size=size, build=partial(_kinds, own=own))[0].model.state_dict()

    whole = trained("whole", 2)
    trained("resumed", 2, "--train.stop_at=3")
    for name, tensor in trained("resumed", 2).items():
        assert torch.equal(tensor, whole[name]), name
    for name, tensor in trained("one", 1).items():
        torch.testing.assert_close(tensor, whole[name], rtol=1e-4, atol=1e-2 if options else 1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--optimizer.name=adamw",), "words makes sparse gradients"),
        (("--optimizer.name=sgd", "--parallel.shard=optimizer"), "filter is complex"),
        (("--optimizer.name=sgd", "--parallel.sync=local:2", "--parallel.workers=2"), "filter is complex"),
    ],
)
def test_what_does_not_support_them_says_so(options: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        train_on_threads(*OPTIONS, f"--run_dir={tmp_path}", *options, size=2, build=_kinds)


@pytest.mark.parametrize(
    ("parameter", "fills"),
    [
        (torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last), True),
        (torch.zeros(4, 6).t(), True),
        (torch.zeros(4, 3, 2).permute(2, 0, 1), True),
        (torch.zeros(8, 6)[:, ::2], False),
        (torch.zeros(8, 6)[:, 1:4], False),
    ],
    ids=["channels last", "transposed", "permuted", "every second column", "some columns"],
)
def test_fused_kernels_need_parameters_that_fill_their_memory(parameter: Tensor, fills: bool) -> None:
    """They ignore strides."""
    assert (why_not_fused([("weight", nn.Parameter(parameter))]) == "") is fills
    model = nn.ParameterList([nn.Parameter(torch.zeros(3)), nn.Parameter(parameter)])
    assert make_optimizer(model, OptimizerConfig()).defaults["fused"] is fills


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
    assert "takes longer: thin of shape (16, 2)" in capsys.readouterr().out
    train_on_threads(*options, f"--run_dir={tmp_path / 'plain'}", size=1, build=partial(build, fused=False))
    assert "takes longer" not in capsys.readouterr().out
    with pytest.raises(TaskError, match=r"SGD\(fused=True\), but thin of shape"):
        train_on_threads(*options, f"--run_dir={tmp_path / 'fused'}", size=1, build=partial(build, fused=True))


@pytest.mark.parametrize(
    ("kind", "moved"),
    [
        (torch.optim.Adagrad, {"sum": "meta", "step": "cpu"}),
        (partial(torch.optim.AdamW, capturable=True), {"exp_avg": "meta", "step": "meta"}),
    ],
    ids=["counts on the host", "counts beside"],
)
def test_the_state_of_an_optimizer_is_where_its_parameters_are(
    kind: Callable[..., torch.optim.Optimizer], moved: dict[str, str]
) -> None:
    """The meta device represents one that a model was moved to after its optimizer was created."""
    parameter = nn.Parameter(torch.zeros(3, device="meta"))
    optimizer = kind([parameter])
    optimizer.state[parameter] = {name: torch.zeros(()) for name in moved} | {"plain": 3}
    move_optimizer_state(optimizer)
    state = optimizer.state[parameter]
    assert {name: value.device.type for name, value in state.items() if name != "plain"} == moved
    assert state["plain"] == 3
