"""The bias of routers balances experts, equally at any number of ranks; their loads are recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvdtrain.comm.solo import SoloComm
from hvdtrain.training.loop.router_loads import EVERY, RouterLoads, make_router_loads
from tests.support.divided_models import DIVIDED, divided
from tests.support.gallery import Recorded
from tests.support.thread_comm import ThreadComm, on_ranks
from tests.support.thread_job import train_on_threads


class Router(nn.Module):
    """Chooses the expert that a token names."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(experts, 2))
        self.e_score_correction_bias = nn.Buffer(torch.zeros(experts))

    def forward(self, experts_T: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros(len(experts_T), len(self.weight)), experts_T


class Model(nn.Module):
    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.gate = Router(experts)

    def forward(self, experts_T: Tensor) -> Any:
        return self.gate(experts_T)


def _loads(model: Model, comm: Any, events: list[Any], *, counts: bool = True) -> RouterLoads:
    found = make_router_loads(model, comm, 0.1, events.append, counts=counts)
    assert found is not None
    return found


def _step(loads: RouterLoads, model: Model, experts: list[int], step: int = 1, *, applied: bool = True) -> None:
    loads.begin()
    with loads.counting():
        model(torch.tensor(experts))
    model(torch.tensor([3, 3, 3]))  # the recomputation in backward, or a pass that does not count
    loads.start()
    loads.finish(step, applied=applied)


def test_each_layer_counts_its_own_tokens() -> None:
    """Of equally and of unequally many tokens and experts, and of a layer that runs twice in a pass."""
    model, events = nn.ModuleDict({"a": Model(), "b": Model(), "c": Model(), "d": Model(2)}), list[Any]()
    loads = make_router_loads(model, SoloComm(), 0.1, events.append, counts=True)
    assert loads is not None
    loads.begin()
    for _ in range(2):
        with loads.counting():
            passes = (("a", [0, 0, 1, 3]), ("b", [2, 2, 2, 2]), ("c", [1, 3]), ("c", [3]), ("d", [0, 0, 1]))
            for name, experts in passes:
                model[name](torch.tensor(experts))
    assert {name: load.tolist() for name, load in loads._loads.items()} == {
        "a.gate": [4, 2, 0, 2],
        "b.gate": [0, 0, 8, 0],
        "c.gate": [0, 2, 0, 4],
        "d.gate": [4, 2],
    }
    loads.start()
    loads.finish(1, applied=True)
    signs = {"a": [-1, 0, 1, 0], "b": [1, 1, -1, 1], "c": [1, -1, 1, -1], "d": [-1, 1]}
    for name, expected in signs.items():
        assert model[name].gate.e_score_correction_bias.tolist() == pytest.approx([0.1 * sign for sign in expected])


def test_experts_with_few_tokens_become_more_likely() -> None:
    model, events = Model(), list[Any]()
    loads = _loads(model, SoloComm(), events)
    _step(loads, model, [0, 0, 0, 1, 1, 2, 2, 2], EVERY)
    assert model.gate.e_score_correction_bias.tolist() == pytest.approx([-0.1, 0.0, -0.1, 0.1])
    assert not events  # until the loads are on the host
    _step(loads, model, [3, 3, 3, 3], applied=False)
    assert model.gate.e_score_correction_bias.tolist() == pytest.approx([-0.1, 0.0, -0.1, 0.1])
    (event,) = events
    assert event["event"] == "experts" and event["at_step"] == EVERY
    layer = event["layers"]["gate"]
    assert (layer["tokens"], layer["busiest"]) == (8, pytest.approx(1.5)) and 0.7 < layer["entropy"] < 0.9
    loads.close()
    _step(loads, model, [0, 0, 0, 0])  # nothing is counted any more
    assert model.gate.e_score_correction_bias.tolist() == pytest.approx([-0.1, 0.0, -0.1, 0.1])


def test_tokens_are_counted_on_all_ranks_and_once() -> None:
    """Ranks 0 and 1 have the same samples, of which one counts."""

    def body(comm: ThreadComm) -> list[float]:
        model = Model()
        loads = _loads(model, comm, [], counts=comm.rank != 1)
        _step(loads, model, [[1], [1], [0, 0, 0, 2, 3]][comm.rank])
        return model.gate.e_score_correction_bias.tolist()

    assert on_ranks(3, body) == [pytest.approx([-0.1, 0.1, 0.1, 0.1])] * 3


def test_a_model_without_routers_has_no_loads() -> None:
    assert make_router_loads(nn.Sequential(nn.Linear(2, 2)), SoloComm(), 0.1, lambda event: None, counts=True) is None


@pytest.mark.parametrize("options", [(), ("--memory.checkpointing=full",)])
def test_biases_do_not_depend_on_the_number_of_ranks(options: tuple[str, ...], tmp_path: Path) -> None:
    found = []
    for size in (1, 2, 3):
        train_on_threads(*DIVIDED, *options, f"--run_dir={tmp_path / str(size) / 'run'}", size=size)
        tensors = Recorded(tmp_path / str(size), 0, "", "").state().tensors["model"]
        found.append(tensors["model.layers.1.mlp.gate.e_score_correction_bias"])
    assert found[0].abs().max() > 0 and all(torch.equal(each, found[0]) for each in found)


def test_training_leaves_no_hooks(tmp_path: Path) -> None:
    """A program goes on with its model, and an elastic job begins another round with it."""
    task = divided()
    train_on_threads(*DIVIDED, f"--run_dir={tmp_path / 'run'}", size=1, build=lambda rank: task)
    assert not any(module._forward_hooks for module in task.model.modules())


def test_a_rate_of_zero_changes_nothing(tmp_path: Path) -> None:
    train_on_threads(*DIVIDED, "--train.router_bias=0", f"--run_dir={tmp_path / 'run'}", size=1)
    tensors = Recorded(tmp_path, 0, "", "").state().tensors["model"]
    assert tensors["model.layers.1.mlp.gate.e_score_correction_bias"].abs().max() == 0
