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
from tests.support.own_loops import OPTIMIZERS, Model, distribute, loss_of, make, train
from tests.support.thread_comm import ThreadComm, on_ranks, per_rank

MISUSES: dict[str, tuple[str, Callable[[Any, Any, int], object]]] = {
    "clip": ("is not on this rank", lambda m, o, r: _clip(m.parameters())),
    "clip by value": ("is not on this rank", lambda m, o, r: nn.utils.clip_grad_value_(m.parameters(), 1.0)),
    "clip what the optimizer has": ("is not on this rank", lambda m, o, r: _clip(_optimized(o))),
    "clip the sums": ("is not on this rank", lambda m, o, r: (o.synchronize(), _clip(_optimized(o)))),
    "stock clipping": ("is not on this rank", lambda m, o, r: (o.synchronize(), _clip(m.parameters()))),
    "clear the sums": ("was cleared or replaced", lambda m, o, r: (o.clip_grad_norm_(1.0), m.zero_grad(), o.step())),
    "read": ("is not on this rank", lambda m, o, r: m.embedding.weight.grad.norm()),
    "clear": ("was changed after backward", lambda m, o, r: (m.zero_grad(), o.step())),
    "replace": ("was changed after backward", lambda m, o, r: (_replace(m), o.step())),
    "zero_grad": ("while gradients were being exchanged", lambda m, o, r: o.zero_grad()),
    "second backward": ("is not on this rank", lambda m, o, r: loss_of(m, r, 1).backward()),
    "second backward, cleared": ("got a second gradient", lambda m, o, r: (m.zero_grad(), loss_of(m, r, 1).backward())),
    "no zero_grad": ("is not on this rank", lambda m, o, r: (o.step(), loss_of(m, r, 1).backward())),
    "synchronize twice": ("were summed before", lambda m, o, r: (o.synchronize(), o.synchronize())),
    "step after synchronize": ("were summed before", lambda m, o, r: (o.synchronize(), o.step())),
    "state_dict": ("gather_state_dict", lambda m, o, r: o.state_dict()),
    "add_param_group": ("cannot be added", lambda m, o, r: o.add_param_group({"params": [_stranger()]})),
    "negative": ("invalid max_norm", lambda m, o, r: o.clip_grad_norm_(-1.0)),
    "no state": ("an optimizer with other parameters", lambda m, o, r: o.load_state_dict({})),
    "wrapped twice": ("distributed already", lambda m, o, r: exchanging(o, o._hvdtrain_exchange)),
    "other state": ("an optimizer with other parameters", lambda m, o, r: o.load_state_dict(_state(nn.Linear(1, 1)))),
}


def _clip(parameters: Any) -> None:
    nn.utils.clip_grad_norm_(parameters, 1.0)


def _optimized(optimizer: Any) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _stranger() -> nn.Parameter:
    return nn.Parameter(torch.ones(3))


def _replace(model: Any) -> None:
    model.embedding.weight.grad = torch.zeros_like(model.embedding.weight)


def _state(model: nn.Module) -> dict[str, Any]:
    return torch.optim.SGD(model.parameters(), lr=0.1).state_dict()


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
@pytest.mark.parametrize("misuse", MISUSES)
@per_rank(2)
def test_what_would_be_silently_wrong_is_an_error(comm: ThreadComm, misuse: str, shard: str) -> None:
    message, action = MISUSES[misuse]
    model, optimizer = make(comm, shard)
    loss_of(model, comm.rank, 0).backward()
    with pytest.raises((CallOrderError, TaskError, ConfigError, CheckpointError), match=message):
        action(model, optimizer, comm.rank)


BETWEEN_STEPS: dict[str, tuple[str, Callable[[Any, Any], object]]] = {
    "an added parameter": ("is not one of the model", lambda m, o: o.param_groups[0]["params"].append(_stranger())),
    "other memory": ("was moved to other memory", lambda m, o: setattr(m.scale, "data", m.scale.data.clone())),
    "other ranks": ("the ranks may have changed", lambda m, o: setattr(o._hvdtrain_exchange, "_last_session", 9)),
    "skip": ("has no sums", lambda m, o: _skip(o)),
}


def _skip(optimizer: Any) -> None:
    with optimizer.skip_synchronize():
        optimizer.step()


@pytest.mark.parametrize("change", BETWEEN_STEPS)
@per_rank(2)
def test_what_changes_between_steps_is_an_error(comm: ThreadComm, change: str) -> None:
    message, action = BETWEEN_STEPS[change]
    model, optimizer = make(comm, "optimizer")
    train(comm, model, optimizer, range(2))
    optimizer.zero_grad()
    with pytest.raises(TaskError, match=message):
        action(model, optimizer)
        loss_of(model, comm.rank, 0).backward()


def test_a_pass_that_is_clipped_is_an_error() -> None:
    """With `gradients`, the first pass was exchanged; with `optimizer`, the program may change it."""

    def body(comm: ThreadComm, shard: str) -> bool:
        model, _ = make(comm, shard, passes=2)
        loss_of(model, comm.rank, 0).backward()
        try:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        except CallOrderError:
            return True
        return False

    for shard, refused in (("optimizer", False), ("gradients", True)):
        assert on_ranks(2, lambda comm, s=shard: body(comm, s)) == [refused] * 2


@pytest.mark.parametrize(
    ("size", "message", "make_optimizer", "compression"),
    [
        (2, "does not support", OPTIMIZERS["adamw"], "topk"),
        (2, "does not support", OPTIMIZERS["adamw"], "powersgd:2"),
        (2, "cannot be divided", torch.optim.LBFGS, "none"),
        (2, "cannot be divided", lambda p: torch.optim.SparseAdam(list(p)), "none"),
        (1, "2 or more ranks", OPTIMIZERS["adamw"], "none"),
    ],
)
@per_rank()
def test_what_cannot_be_divided_is_refused(
    comm: ThreadComm, size: int, message: str, make_optimizer: Callable[[Any], Optimizer], compression: str
) -> None:
    model = Model()
    with pytest.raises(ConfigError, match=message):
        distribute(comm, model, make_optimizer(model.parameters()), "optimizer", compression)


@per_rank(2)
def test_state_on_one_rank_is_refused(comm: ThreadComm) -> None:
    model = Model()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    if comm.rank == 0:
        loss_of(model, 0, 0).backward()
        optimizer.step()
    with pytest.raises(ConfigError, match="other state on some ranks"):
        distribute(comm, model, optimizer, "optimizer")
