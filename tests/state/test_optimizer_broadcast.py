"""An optimizer's state and options come from one rank; no parameter changes, and no state comes from nowhere."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hvdtrain.errors import TaskError
from hvdtrain.state.optimizer_broadcast import broadcast_optimizer
from tests.support.thread_comm import ThreadComm, on_ranks, per_rank

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p, lr: torch.optim.AdamW(p, lr, weight_decay=0.1),
    "one by one": lambda p, lr: torch.optim.Adam(p, torch.tensor(lr), foreach=False, amsgrad=True),
    "sgd": torch.optim.SGD,
    "momentum": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9),
    "lists": lambda p, lr: torch.optim.LBFGS(p, lr, max_iter=2, history_size=3),
    "rows": lambda p, lr: torch.optim.SparseAdam(p, lr),
}
"""By what they keep: makes one with a learning rate."""


def _trained(kind: str, lr: float, steps: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model: Any = nn.Embedding(5, 3, sparse=True) if kind == "rows" else nn.Linear(3, 2)
    optimizer = OPTIMIZERS[kind](model.parameters(), lr)
    given = torch.tensor([1, 3]) if kind == "rows" else torch.ones(4, 3)
    for _ in range(steps):

        def loss() -> Any:
            optimizer.zero_grad()
            (value := (model(given) - 1).pow(2).mean()).backward()
            return value

        optimizer.step(loss)
    return model, optimizer


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("steps", [(3, 0, 0), (0, 3, 1), (2, 2, 4)], ids=["resumed", "fresh", "both"])
def test_all_ranks_have_what_the_root_has(kind: str, steps: tuple[int, ...]) -> None:
    _, root = _trained(kind, 0.1, steps[0])
    expected = root.state_dict()

    def body(comm: ThreadComm) -> None:
        model, optimizer = _trained(kind, 0.1 + comm.rank, steps[comm.rank])
        before = copy.deepcopy(model.state_dict())
        broadcast_optimizer(optimizer, comm)
        found = optimizer.state_dict()
        torch.testing.assert_close(found["state"], expected["state"], rtol=0, atol=0)
        assert found["param_groups"] == expected["param_groups"]
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)

    on_ranks(3, body)


@per_rank(2)
def test_tensors_stay_where_others_may_refer_to_them(comm: ThreadComm) -> None:
    model, optimizer = _trained("one by one", 0.1 + comm.rank, 2 + comm.rank)
    rate, average = optimizer.param_groups[0]["lr"], optimizer.state[model.weight]["exp_avg"]
    broadcast_optimizer(optimizer, comm, root=1)
    assert optimizer.param_groups[0]["lr"] is rate and rate.item() == pytest.approx(1.1)
    assert optimizer.state[model.weight]["exp_avg"] is average


@per_rank(2)
def test_sparse_state_arrives_sparse(comm: ThreadComm) -> None:
    parameter = nn.Parameter(torch.zeros(6, 2))
    optimizer = torch.optim.SGD([parameter], 0.1)
    if comm.rank == 0:
        rows = torch.tensor([[0.0, 0], [3, 4], [0, 0], [0, 0], [1, 2], [0, 0]])
        optimizer.state[parameter]["momentum_buffer"] = rows.to_sparse(1)
    broadcast_optimizer(optimizer, comm)
    found = optimizer.state[parameter]["momentum_buffer"]
    assert found.is_sparse
    assert found.to_dense().tolist() == [[0, 0], [3, 4], [0, 0], [0, 0], [1, 2], [0, 0]]


@per_rank(2)
def test_state_in_half_precision_keeps_its_type_and_layout(comm: ThreadComm) -> None:
    parameter = nn.Parameter(torch.zeros(2, 3, 4, 4, dtype=torch.bfloat16).to(memory_format=torch.channels_last))
    optimizer = torch.optim.SGD([parameter], 0.1)
    if comm.rank == 0:
        optimizer.state[parameter] = {"mean": torch.ones(2, 3, 4, 4), "kept": (1, None, [torch.ones(2)]), "none": None}
    broadcast_optimizer(optimizer, comm)
    found = optimizer.state[parameter]
    assert found["mean"].dtype == torch.float32 and bool((found["mean"] == 1).all())
    assert comm.rank == 0 or found["mean"].stride() == parameter.stride()
    assert found["kept"][:2] == (1, None) and found["kept"][2][0].tolist() == [1, 1] and found["none"] is None


@pytest.mark.parametrize(
    ("options", "word"), [({"width": 4}, "other parameters"), ({"by": object()}, "values that cannot be sent: object")]
)
def test_what_cannot_be_is_an_error_on_every_rank(options: dict[str, Any], word: str) -> None:
    def body(comm: ThreadComm) -> None:
        own = options if comm.rank == 0 else {}
        parameter = nn.Parameter(torch.zeros(own.get("width", 3)))
        optimizer = torch.optim.SGD([{"params": [parameter], "by": own.get("by")}], 0.1)
        with pytest.raises(TaskError) as caught:
            broadcast_optimizer(optimizer, comm)
        assert caught.value.everywhere and all(part in str(caught.value) for part in word.split(": "))

    on_ranks(2, body)
