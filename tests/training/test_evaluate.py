"""Held-out loss: each sample once at any number of ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hvdtrain.comm.solo import SoloComm
from hvdtrain.task.base import Task
from hvdtrain.training.evaluate import Evaluation, evaluate
from hvdtrain.training.precision import Precision
from tests.support.thread_comm import ThreadComm, on_ranks
from tests.support.toy import Net, toy

CPU = torch.device("cpu")


class Plain(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.x[index].sum()


def _task(samples: int = 11) -> Task:
    base = toy()
    data = Plain(torch.randn(samples, 6, generator=torch.Generator().manual_seed(1)))
    torch.manual_seed(0)
    return Task(Net(8, 0.5), base.loss, data, data, metrics=base.metrics)


def _evaluate(task: Task, comm: object, most: int = 0) -> Evaluation:
    found = evaluate(task, task.model, comm, Precision("fp32", CPU), CPU, micro_batch=3, most=most)  # type: ignore[arg-type]
    assert found is not None
    return found


def test_equals_the_mean_over_all_samples() -> None:
    task = _task()
    found = _evaluate(task, SoloComm())
    task.model.eval()
    x = task.heldout_data.x  # type: ignore[union-attr]
    with torch.no_grad():
        loss, weight = task.loss(task.model, (x, x.sum(1)))
    assert found.loss == pytest.approx(float(loss / weight), rel=1e-6)
    assert found.metrics["positive"] == pytest.approx(float((task.model(x) > 0).float().mean()))
    assert found.samples == 11


@pytest.mark.parametrize("size", [2, 3, 6])
def test_any_size_gives_the_same(size: int) -> None:
    alone = _evaluate(_task(), SoloComm())

    tasks = [_task() for _ in range(size)]

    def body(comm: ThreadComm) -> Evaluation:
        return _evaluate(tasks[comm.rank], comm)

    found = on_ranks(size, body)
    assert all(f == found[0] for f in found)
    assert found[0].loss == pytest.approx(alone.loss, rel=1e-12)
    assert found[0].metrics == alone.metrics


def test_most_spreads_over_all_samples() -> None:
    task = _task()
    found = _evaluate(task, SoloComm(), most=4)
    some = Plain(task.heldout_data.x[[0, 2, 5, 8]])  # type: ignore[union-attr]
    expected = _evaluate(Task(task.model, task.loss, task.train_data, some), SoloComm())
    assert (found.loss, found.samples) == (expected.loss, 4)


def test_what_a_model_keeps_from_evaluation_serves_training() -> None:
    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 1)
            self.frozen = nn.Dropout(0.5).eval()
            self.cache: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.cache = torch.ones(6) if self.cache is None else self.cache
            return self.layer(self.frozen(x) * self.cache).squeeze(-1)

    base = _task()
    model = Caching()
    _evaluate(Task(model, base.loss, base.train_data, base.heldout_data), SoloComm())
    assert (model.training, model.frozen.training) == (True, False)
    base.loss(model, (torch.ones(2, 6), torch.ones(2)))[0].backward()


def test_leaves_the_model_training_and_nothing_held_out_is_none() -> None:
    task = _task()
    _evaluate(task, SoloComm())
    assert task.model.training
    bare = Task(task.model, task.loss, task.train_data)
    assert evaluate(bare, task.model, SoloComm(), Precision("fp32", CPU), CPU, micro_batch=3, most=0) is None
