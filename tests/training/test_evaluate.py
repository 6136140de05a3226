"""Held-out loss: each sample once at any number of ranks."""

from __future__ import annotations

import copy
import dataclasses
import os
from typing import Any

import pytest
import torch
from torch import nn

from hvdtrain.comm.solo import SoloComm
from hvdtrain.config.schema import Config, LoaderConfig, TrainConfig
from hvdtrain.errors import TaskError
from hvdtrain.task.base import Task
from hvdtrain.training.loop.evaluate import Evaluation, HeldOut, evaluate
from hvdtrain.training.loop.forward import Precision
from tests.support.thread_comm import on_ranks
from tests.support.toy import Net, toy

CPU = torch.device("cpu")


class Plain(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.taken = x, list[int]()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.taken.append(index)
        return self.x[index], self.x[index].sum()


def _task(samples: int = 11) -> Task:
    base = toy()
    data = Plain(torch.randn(samples, 6, generator=torch.Generator().manual_seed(1)))
    torch.manual_seed(0)
    return Task(Net(8, 0.5), base.loss, data, data, metrics=base.metrics)


def _evaluate(
    task: Task, comm: Any = None, *, micro_batch: int = 3, most: int = 0, workers: int = 0, times: int = 1, **how: Any
) -> Evaluation:
    comm, device = comm or SoloComm(), how.pop("device", CPU)
    config = Config(train=TrainConfig(micro_batch=micro_batch, eval_samples=most), loader=LoaderConfig(workers=workers))
    held_out = HeldOut(task, comm, config, device)
    for _ in range(times):
        found = evaluate(held_out, task.model, Precision("fp32", CPU), **how)
    assert found is not None
    return found


def test_equals_the_mean_over_all_samples() -> None:
    task, touched = _task(), []
    found = _evaluate(task, touch=lambda: touched.append(1))
    assert len(touched) == 4 and task.model.training
    task.model.eval()
    x = task.heldout_data.x  # type: ignore[union-attr]
    with torch.no_grad():
        loss, weight = task.loss(task.model, (x, x.sum(1)))
    assert found.loss == pytest.approx(float(loss / weight), rel=1e-6)
    assert found.metrics["positive"] == pytest.approx(float((task.model(x) > 0).float().mean()))
    assert found.samples == 11


def _with_objects(samples: int) -> Task:
    """F1 sums its states; the area under the curve keeps all predictions."""
    classification = pytest.importorskip("torchmetrics.classification")
    objects = {"f1": classification.BinaryF1Score(), "area": classification.BinaryAUROC()}

    def metrics(model: nn.Module, batch: Any) -> dict[str, tuple[Any, ...]]:
        scores, targets = torch.sigmoid(model(batch[0])), (batch[1] > 0).long()
        return {"f1": (scores, targets), "area": (scores, targets), "one": (float(len(targets)), len(targets))}

    return dataclasses.replace(_task(samples), metrics=metrics, metric_objects=objects)


@pytest.mark.parametrize(("size", "samples"), [(1, 11), (2, 11), (3, 11), (4, 2)])
def test_metric_objects_see_each_sample_once(size: int, samples: int) -> None:
    """With 4 ranks, some have no sample."""
    from torchmetrics.functional.classification import binary_auroc, binary_f1_score

    task = _with_objects(samples)
    copies = [dataclasses.replace(copy.deepcopy(task), loss=task.loss) for _ in range(size)]
    task.model.eval()
    x = task.heldout_data.x  # type: ignore[union-attr]
    with torch.no_grad():
        scores, targets = torch.sigmoid(task.model(x)), (x.sum(1) > 0).long()
    expected = {"f1": float(binary_f1_score(scores, targets)), "area": float(binary_auroc(scores, targets)), "one": 1.0}
    for _ in range(2):  # a second evaluation begins anew
        found = on_ranks(size, lambda comm: _evaluate(copies[comm.rank], comm).metrics)
        assert found == [pytest.approx(expected)] * size


def test_metric_objects_that_get_nothing_or_cannot_be_gathered_are_refused() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    loose, confusion = torchmetrics.CatMetric(), torchmetrics.classification.BinaryConfusionMatrix()
    loose._reductions["value"] = None
    task = _with_objects(4)
    for word, changes in (
        ("invalid value", {"metrics": lambda model, batch: {"f1": (1.0, 1.0), "one": 1.0}}),
        ("'area'", {"metrics": lambda model, batch: {"one": (1.0, 1.0)}}),
        ("dist_reduce_fx", {"metric_objects": {"x": loose}, "metrics": toy().metrics}),
        ("4 values", {"metric_objects": {"f1": confusion}, "metrics": lambda m, b: {"f1": task.metrics(m, b)["f1"]}}),
    ):
        with pytest.raises(TaskError, match=word):
            _evaluate(dataclasses.replace(task, **changes))


@pytest.mark.parametrize("samples", [1, 7, 11, 12])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_each_sample_is_used_once_and_any_size_gives_the_same(size: int, samples: int) -> None:
    """`most` 0 is all of them; micro-batches are of 3 samples."""
    alone = _evaluate(_task(samples))
    task = _task(samples)
    data = [Plain(task.heldout_data.x) for _ in range(size)]  # type: ignore[union-attr]
    tasks = [dataclasses.replace(task, model=copy.deepcopy(task.model), heldout_data=heldout) for heldout in data]
    found = on_ranks(size, lambda comm: _evaluate(tasks[comm.rank], comm))
    assert sorted(index for heldout in data for index in heldout.taken) == list(range(samples))
    assert all(f == found[0] for f in found)
    assert found[0].loss == pytest.approx(alone.loss, rel=1e-12)
    assert (found[0].metrics, found[0].samples) == (alone.metrics, samples)


class Made(torch.utils.data.Dataset[tuple[torch.Tensor, float]]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[torch.Tensor, float]:
        return torch.rand(6, dtype=torch.float64), float(os.getpid())


def test_loader_processes_make_samples_and_stay_and_change_nothing() -> None:
    found: list[set[float]] = []

    def metrics(model: nn.Module, batch: Any) -> dict[str, tuple[float, float]]:
        found[-1].update(batch[1].tolist())
        return {}

    task = dataclasses.replace(
        _task(), loss=lambda m, b: (b[0].sum(), 6.0), heldout_data=Made(), metrics=metrics, nominal_weight=6.0
    )
    losses = []
    for workers in (0, 1):
        found.append(set())
        losses.append(_evaluate(task, micro_batch=2, workers=workers, times=2).loss)
    assert losses[0] == losses[1]
    (own,), (other,) = found  # one process in both evaluations
    assert own == os.getpid() != other


def test_nothing_waits_for_the_device_before_the_end() -> None:
    """A tensor of the device meta has no value: to read one is an error."""
    base, touched = _task(), []
    task = Task(base.model.to("meta"), lambda m, b: (m(b[0]).sum(), 3.0), base.train_data, base.heldout_data)
    with pytest.raises(RuntimeError, match="meta"):
        _evaluate(task, device=torch.device("meta"), touch=lambda: touched.append(1))
    assert len(touched) == 4


def test_sums_are_in_float64() -> None:
    """fp32 holds no odd number beyond 2**24."""
    data = torch.utils.data.TensorDataset(torch.tensor([2.0**24, 1.0, 1.0, 1.0]))
    task = Task(nn.Linear(1, 1), lambda m, b: (b[0].sum(), 1), data, data)
    assert _evaluate(task, micro_batch=1).loss * 4 == 2**24 + 3


def test_samples_made_with_random_numbers_are_the_same_each_time() -> None:
    task = toy()
    first = _evaluate(task)
    torch.rand(3)
    assert _evaluate(task) == first


def test_most_spreads_over_all_samples() -> None:
    task = _task()
    found = _evaluate(task, most=4)
    some = Plain(task.heldout_data.x[[0, 2, 5, 8]])  # type: ignore[union-attr]
    assert (found.loss, found.samples) == (_evaluate(dataclasses.replace(task, heldout_data=some)).loss, 4)


def test_state_kept_during_evaluation_can_be_used_in_training() -> None:
    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 1)
            self.frozen = nn.Dropout(0.5).eval()
            self.cache: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.cache = torch.ones(6) if self.cache is None else self.cache
            return self.layer(self.frozen(x) * self.cache).squeeze(-1)

    task = dataclasses.replace(_task(), model=Caching())
    _evaluate(task)
    assert (task.model.training, task.model.frozen.training) == (True, False)  # type: ignore[union-attr]
    task.loss(task.model, (torch.ones(2, 6), torch.ones(2)))[0].backward()  # type: ignore[union-attr]
