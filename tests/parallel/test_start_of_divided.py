"""How a model that ranks divide comes into being: only rank 0 ever has the whole."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hvdtrain import Task
from hvdtrain.comm.base import Comm
from hvdtrain.comm.dimensions import Dimensions
from hvdtrain.comm.objects import allgather_json, broadcast_json
from hvdtrain.config.schema import Config
from hvdtrain.engine.base import Engine
from hvdtrain.engine.make import make_engine
from hvdtrain.errors import HvdtrainError
from hvdtrain.plan.plan import Plan
from hvdtrain.state.divided import is_divided
from hvdtrain.state.placeholder import Placeholder
from hvdtrain.task.causal_lm import ModelConfig, causal_lm
from hvdtrain.training.start.make_task import make_task, make_task_by_rank
from tests.support.divided_models import divided

MIB = 1 << 20
COLWISE = {"blocks.*": "colwise"}
pytestmark = pytest.mark.usefixtures("several_ranks")


def _task(model: nn.Module, plan: Mapping[str, str] = COLWISE) -> Task:
    return Task(model, lambda model, batch: (model(batch[0]).sum(), 1), TensorDataset(torch.rand(4, 3)), plan=plan)


def _make(build: Callable[[], Task], job: Comm) -> tuple[Task, str]:
    return make_task_by_rank(partial(make_task, build, Config()), job)


def _divide(task: Task, job: Comm, by: str = "fsdp") -> Engine:
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.1)
    if by == "fsdp":
        return make_engine(optimizer, task.model, job, Plan("fsdp", shard="parameters"))
    dimensions = Dimensions(**{by: job.size})
    return make_engine(optimizer, task.model, job, Plan(dimensions=dimensions), styles=task.plan)


def _named(model: nn.Module) -> dict[str, Any]:
    return dict(model.named_parameters(remove_duplicate=False))


def _check_values(model: nn.Module, expected: dict[str, Any]) -> None:
    found = _named(model)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        whole = found[name].full_tensor() if is_divided(found[name]) else found[name]
        assert torch.equal(whole, tensor), name
        assert found[name].requires_grad == tensor.requires_grad


class Tied(nn.Module):
    """Of a block and outside of blocks, of two dtypes; one has fewer rows than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)) for _ in range(2)))
        self.layers[0][1].weight = self.layers[0][0].weight
        self.head, self.wide = nn.Linear(3, 1), nn.Parameter(torch.rand(5, 2).double(), requires_grad=False)
        self.embedding, self.out = nn.Embedding(7, 3), nn.Linear(3, 7)
        self.out.weight = self.embedding.weight


def test_every_rank_gets_rows_of_rank_0(job: Comm) -> None:
    """Also one that has made a model with values, other ones."""
    expected = _named(make_task(lambda: _task(Tied()), Config()).model)

    def build() -> Task:
        model = Tied()
        if job.rank % 2:
            assert float(model.out.weight.detach().sum()) != 0
            nn.init.zeros_(model.out.weight)
        return _task(model)

    for make in (lambda: _task(Tied()), build):
        task, _ = _make(make, job)
        engine = _divide(task, job)
        _check_values(task.model, expected)
        assert all(is_divided(parameter) for parameter in task.model.parameters())
        assert task.model.layers[0][1].weight is task.model.layers[0][0].weight
        assert task.model.out.weight is task.model.embedding.weight
        assert not any(isinstance(p, Placeholder) for group in engine.optimizer.param_groups for p in group["params"])
        engine.close()


@pytest.mark.parametrize("by", ["tp", "ep"])
@pytest.mark.parametrize("kind", ["deepseek", "llama", "own"])
def test_every_rank_gets_parts_of_rank_0(by: str, kind: str, job: Comm) -> None:
    if job.size > 2 or (kind == "llama" and by == "ep"):
        pytest.skip("other numbers do not divide the heads, or there are no experts")
    build = partial(divided, kind, tied=True)
    expected = _named(make_task(build, Config()).model)
    task, warning = _make(build, job)
    assert not warning
    engine = _divide(task, job, by)
    _check_values(task.model, expected)
    assert sum(map(is_divided, task.model.parameters())) >= 2
    if kind == "llama":
        assert task.model.lm_head.weight is task.model.model.embed_tokens.weight
    assert not any(buffer.is_meta for buffer in task.model.buffers())
    optimized = [p for group in engine.optimizer.param_groups for p in group["params"]]
    assert not any(isinstance(p, Placeholder) or p.is_meta or is_divided(p) for p in optimized)
    assert len(optimized) == len(list(task.model.parameters()))
    engine.close()


class Blocks(nn.Module):
    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))


def _reads() -> Task:
    model = nn.Linear(3, 1)
    return _task(model) if model.weight.sum().item() < 99 else _task(nn.Linear(3, 2))


def _draws() -> Task:
    """Other random numbers, where parameters are not torch's own."""
    model = nn.Linear(3, 1)
    if type(model.weight) is nn.Parameter:
        torch.rand(1)
    return _task(model)


@pytest.mark.parametrize(("build", "reason"), [(_reads, r"RuntimeError: .*item"), (_draws, "draws other random")])
def test_a_task_that_needs_values_is_made_again(build: Callable[[], Task], reason: str, job: Comm) -> None:
    """With the same data. (Of the law 9's runs, some are of jobs where one rank does so.)"""
    task, warning = _make(build, job)
    assert warning.startswith(f"{job.size - 1} rank(s) besides rank 0 have built the whole model")
    assert re.search(reason, warning) and warning.endswith("(rank 1)")
    assert not any(isinstance(parameter, Placeholder) for parameter in task.model.parameters())
    data = allgather_json(job, [task.train_data[i][0].tolist() for i in range(4)], name="data")
    assert all(each == data[0] for each in data)


def test_an_error_before_the_model_is_raised_at_once(job: Comm) -> None:
    calls = []

    def build() -> Task:
        calls.append(1)
        raise FileNotFoundError("no data")

    with pytest.raises(FileNotFoundError, match="no data"):
        _make(build, job)
    assert len(calls) == 1


def _resident(name: str) -> int:
    """Bytes of this process's memory: now (VmRSS), or at most since the peak was forgotten (VmHWM)."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) << 10


@pytest.mark.parametrize("by", ["fsdp", "tp", "pp"])
def test_a_rank_holds_its_rows_and_one_block(by: str, job: Comm) -> None:
    """8 blocks of 16 MiB: rank 0 begins with all, and the others never hold more than rows / size + a block."""
    width, blocks, slack = 2048, 8, 12 * MIB
    block = width * width * 4
    _divide(_make(lambda: _task(Blocks(4 * job.size, job.size)), job)[0], job, by).close()  # imports

    def build() -> Task:
        """Parameters with memory, one after the other; then other values for all, as transformers' models do."""
        model = Blocks(width, blocks)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        return _task(model)

    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("this kernel cannot forget a peak")
    before = _resident("VmRSS")
    task, warning = _make(build, job)
    built = _resident("VmHWM") - before
    engine = _divide(task, job, by)
    peak, rows = _resident("VmHWM") - before, blocks * block // job.size
    assert not warning
    end_s = time.monotonic() + 10
    while _resident("VmRSS") - before >= rows + slack and time.monotonic() < end_s:
        time.sleep(0.05)  # the thread that has sent the last block may still hold it
    assert _resident("VmRSS") - before < rows + slack
    if job.rank:
        assert built < block + slack
        assert peak < rows + block + slack
    else:
        assert peak < blocks * block + block + slack
    engine.close()


def _saved(folder: Path, job: Comm) -> tuple[Path, Callable[[], Task]]:
    """The folder of a model of transformers, which rank 0 has written, and what makes a task of it."""
    pytest.importorskip("transformers", minversion="5.23")
    made = Path(broadcast_json(job, str(folder), name="folder")) / "saved"
    if job.rank == 0:
        divided("deepseek", tied=False).model.save_pretrained(made)
    job.barrier()
    config = ModelConfig(from_=str(made))
    return made, lambda: _task(causal_lm(config, vocabulary=64, seq_len=8, may_read_later=True), plan={})


@pytest.mark.parametrize("by", ["fsdp", "tp", "ep"])
def test_the_weights_of_a_folder_are_read_where_they_are_placed(by: str, job: Comm, tmp_path: Path) -> None:
    """No rank has them before; each gets its part of them."""
    if job.size > 2:
        pytest.skip("other numbers do not divide the heads")
    _, build = _saved(tmp_path, job)
    expected = _named(make_task(build, Config()).model)
    whole, _ = make_task_by_rank(partial(make_task, build, Config()), job, may_read_later=False)
    assert isinstance(next(whole.model.parameters()), Placeholder) == (job.rank > 0), "rank 0 has the values"
    del whole  # placeholders of other models are refused
    task, warning = _make(build, job)
    assert not warning and all(isinstance(p, Placeholder) for p in task.model.parameters())
    engine = _divide(task, job, by)
    _check_values(task.model, expected)
    engine.close()


def test_weights_that_cannot_be_read_are_an_error_on_each_rank(job: Comm, tmp_path: Path) -> None:
    folder, build = _saved(tmp_path, job)
    task, _ = _make(build, job)
    job.barrier()
    if job.rank == 0:
        next(folder.glob("*.safetensors")).write_bytes(b"")
    job.barrier()
    with pytest.raises(HvdtrainError, match=r"cannot be read from .*\.safetensors"):
        _divide(task, job, "fsdp")
