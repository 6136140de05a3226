"""A user's optimizer with torch's GradScaler: residuals follow the loss scale."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hvdtrain.comm.solo import SoloComm
from hvdtrain.compression.table import parse
from hvdtrain.exchange.optimizer import exchanging
from hvdtrain.exchange.own_loop import Exchange
from hvdtrain.exchange.reducer import Reducer
from tests.support.thread_comm import ThreadComm, on_ranks


def _trained(comm: ThreadComm, scales: list[float], compression: str) -> Tensor:
    """A parameter after steps of SGD under these loss scales, with the same gradients."""
    parameter = nn.Parameter(torch.zeros(8))
    reducer = Reducer(lambda: [("p", parameter)], comm, parse(compression), weight=1 / comm.size, passes=1)
    terms = (comm, 1 / comm.size, 1.0)
    optimizer = exchanging(torch.optim.SGD([parameter], lr=1.0), Exchange(reducer, lambda: terms, lambda: 0))
    scaler = torch.amp.GradScaler("cpu", init_scale=scales[0], growth_interval=1000)
    for scale in [*scales[1:], scales[-1]]:
        optimizer.zero_grad()
        scaler.scale((parameter * (torch.arange(8.0) + comm.rank)).sum()).backward()
        scaler.step(optimizer)
        scaler.update(scale)
    return parameter.detach()


@pytest.mark.parametrize("compression", ["topk:0.2", "int8"])
def test_a_loss_scale_that_changes_changes_no_step(compression: str) -> None:
    """By powers of two, so that nothing is rounded."""
    plain = on_ranks(2, lambda comm: _trained(comm, [64.0] * 6, compression))
    found = on_ranks(2, lambda comm: _trained(comm, [64.0, 64.0, 8.0, 8.0, 256.0, 16.0], compression))
    assert plain[0].count_nonzero() and all(torch.equal(plain[0], one) for one in [*plain, *found])


def test_the_exchange_restarts_once_when_the_ranks_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each further restart would drop what compression has learned."""
    parameter, session, restarts = nn.Parameter(torch.zeros(8)), [0], list[int]()
    reducer = Reducer(lambda: [("p", parameter)], SoloComm(), parse("int8"), weight=1.0, passes=1)
    monkeypatch.setattr(reducer, "restart", lambda *_: restarts.append(session[0]))
    terms = (SoloComm(), 1.0, 1.0)
    optimizer = exchanging(torch.optim.SGD([parameter], lr=1.0), Exchange(reducer, lambda: terms, lambda: session[0]))
    for session[0] in (1, 1, 2, 2, 2):
        parameter.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert restarts == [1, 2]
