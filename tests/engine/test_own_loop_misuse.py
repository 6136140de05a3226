"""What would be silently wrong with a divided optimizer in a user's loop is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from hvdtrain.errors import CallOrderError, CheckpointError, ConfigError, TaskError
from hvdtrain.exchange.optimizer import exchanging
from tests.support.own_loops import (
    OPTIMIZERS,
    Model,
    distribute,
    loss_of,
)
from tests.support.thread_comm import ThreadComm, on_ranks

MISUSES: dict[str, tuple[str, Callable[[nn.Module, Any, int], object]]] = {
    "clip": ("is not on this rank", lambda m, o, r: nn.utils.clip_grad_norm_(m.parameters(), 1.0)),
    "clip by value": ("is not on this rank", lambda m, o, r: nn.utils.clip_grad_value_(m.parameters(), 1.0)),
    "clip what the optimizer has": (
        "is not on this rank",
        lambda m, o, r: nn.utils.clip_grad_norm_([p for g in o.param_groups for p in g["params"]], 1.0),
    ),
    "clip the sums": (
        "is not on this rank",
        lambda m, o, r: (
            o.synchronize(),
            nn.utils.clip_grad_norm_([p for g in o.param_groups for p in g["params"]], 1.0),
        ),
    ),
    "clear the sums": ("was cleared or replaced", lambda m, o, r: (o.clip_grad_norm_(1.0), m.zero_grad(), o.step())),
    "read": ("is not on this rank", lambda m, o, r: m.embedding.weight.grad.norm()),
    "clear": ("was changed after backward", lambda m, o, r: (m.zero_grad(), o.step())),
    "replace": ("was changed after backward", lambda m, o, r: (_replace(m), o.step())),
    "zero_grad": ("while gradients were being exchanged", lambda m, o, r: o.zero_grad()),
    "second backward": ("is not on this rank", lambda m, o, r: loss_of(m, r, 1).backward()),
    "second backward, cleared": ("got a second gradient", lambda m, o, r: (m.zero_grad(), loss_of(m, r, 1).backward())),
    "no zero_grad": ("is not on this rank", lambda m, o, r: (o.step(), loss_of(m, r, 1).backward())),
    "stock clipping": (
        "is not on this rank",
        lambda m, o, r: (o.synchronize(), nn.utils.clip_grad_norm_(m.parameters(), 1)),
    ),
    "synchronize twice": ("were summed before", lambda m, o, r: (o.synchronize(), o.synchronize())),
    "step after synchronize": ("were summed before", lambda m, o, r: (o.synchronize(), o.step())),
    "state_dict": ("gather_state_dict", lambda m, o, r: o.state_dict()),
    "add_param_group": (
        "cannot be added",
        lambda m, o, r: o.add_param_group({"params": [nn.Parameter(torch.ones(3))]}),
    ),
    "negative": ("invalid max_norm", lambda m, o, r: o.clip_grad_norm_(-1.0)),
    "no state": ("an optimizer with other parameters", lambda m, o, r: o.load_state_dict({})),
    "wrapped twice": ("distributed already", lambda m, o, r: exchanging(o, o._hvdtrain_exchange)),
    "other state": ("an optimizer with other parameters", lambda m, o, r: o.load_state_dict(_state(nn.Linear(1, 1)))),
}


def _replace(model: Any) -> None:
    model.embedding.weight.grad = torch.zeros_like(model.embedding.weight)


def _state(model: nn.Module) -> dict[str, Any]:
    return torch.optim.SGD(model.parameters(), lr=0.1).state_dict()


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
@pytest.mark.parametrize("misuse", MISUSES)
def test_what_would_be_silently_wrong_is_an_error(misuse: str, shard: str) -> None:
    message, action = MISUSES[misuse]

    def body(comm: ThreadComm) -> None:
        model = Model()
        optimizer = distribute(comm, model, OPTIMIZERS["adamw"](model.parameters()), shard)
        loss_of(model, comm.rank, 0).backward()
        with pytest.raises((CallOrderError, TaskError, ConfigError, CheckpointError), match=message):
            action(model, optimizer, comm.rank)

    on_ranks(2, body)


BETWEEN_STEPS: dict[str, tuple[str, Callable[[nn.Module, Any], object]]] = {
    "an added parameter": (
        "is not one of the model",
        lambda m, o: o.param_groups[0]["params"].append(nn.Parameter(torch.ones(3))),
    ),
    "other memory": ("was moved to other memory", lambda m, o: setattr(m.scale, "data", m.scale.data.clone())),
    "other ranks": ("the ranks may have changed", lambda m, o: setattr(o._hvdtrain_exchange, "_last_session", 9)),
    "skip": ("has no sums", lambda m, o: _skip(o)),
}


def _skip(optimizer: Any) -> None:
    with optimizer.skip_synchronize():
        optimizer.step()


@pytest.mark.parametrize("change", BETWEEN_STEPS)
def test_what_changes_between_steps_is_an_error(change: str) -> None:
    message, action = BETWEEN_STEPS[change]

    def body(comm: ThreadComm) -> None:
        model = Model()
        optimizer = distribute(comm, model, OPTIMIZERS["adamw"](model.parameters()), "optimizer")
        for _ in range(2):
            loss_of(model, comm.rank, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
        with pytest.raises(TaskError, match=message):
            action(model, optimizer)
            loss_of(model, comm.rank, 0).backward()

    on_ranks(2, body)


def test_a_pass_that_is_clipped_is_an_error() -> None:
    """With `gradients`, the first pass was exchanged; with `optimizer`, the program may change it."""

    def body(comm: ThreadComm, shard: str) -> bool:
        model = Model()
        distribute(comm, model, OPTIMIZERS["adamw"](model.parameters()), shard, passes=2)
        loss_of(model, comm.rank, 0).backward()
        try:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        except CallOrderError:
            return True
        return False

    assert [on_ranks(2, lambda comm, s=s: body(comm, s)) for s in ("optimizer", "gradients")] == [
        [False] * 2,
        [True] * 2,
    ]


REFUSED: dict[str, tuple[str, Callable[[Any], Optimizer], dict[str, Any]]] = {
    "topk": ("does not support", OPTIMIZERS["adamw"], {"compression": "topk"}),
    "powersgd": ("does not support", OPTIMIZERS["adamw"], {"compression": "powersgd:2"}),
    "lbfgs": ("cannot be divided", torch.optim.LBFGS, {}),
    "sparse adam": ("cannot be divided", lambda p: torch.optim.SparseAdam(list(p)), {}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_divided_is_refused(case: str) -> None:
    message, make, options = REFUSED[case]

    def body(comm: ThreadComm) -> None:
        model = Model()
        with pytest.raises(ConfigError, match=message):
            distribute(comm, model, make(model.parameters()), "optimizer", **options)

    on_ranks(2, body)


def test_one_rank_is_refused() -> None:
    def body(comm: ThreadComm) -> None:
        model = Model()
        with pytest.raises(ConfigError, match="2 or more ranks"):
            distribute(comm, model, OPTIMIZERS["adamw"](model.parameters()), "optimizer")

    on_ranks(1, body)


def test_state_on_one_rank_is_refused() -> None:
    def body(comm: ThreadComm) -> None:
        model = Model()
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        if comm.rank == 0:
            loss_of(model, 0, 0).backward()
            optimizer.step()
        with pytest.raises(ConfigError, match="other state on some ranks"):
            distribute(comm, model, optimizer, "optimizer")

    on_ranks(2, body)


def test_a_sparse_gradient_is_refused() -> None:
    def body(comm: ThreadComm) -> None:
        model = Model()
        model.embedding.sparse = True
        optimizer = distribute(comm, model, OPTIMIZERS["momentum"](model.parameters()), "optimizer")
        with pytest.raises(TaskError, match=r"the gradient of embedding\.weight is sparse"):
            model.embedding(torch.tensor([1, 2])).sum().backward()
        assert optimizer.param_groups

    on_ranks(2, body)
