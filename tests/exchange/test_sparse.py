"""Sparse gradients: as dense ones would add up, and still sparse."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hvdtrain.comm.solo import SoloComm
from hvdtrain.engine.make import make_engine
from hvdtrain.exchange.reducer import Reducer
from tests.support.thread_comm import ThreadComm, per_rank


def _model(sparse: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(10, 3, sparse=sparse), nn.Linear(3, 2))


def _indices(rank: int, step: int) -> torch.Tensor:
    return torch.tensor([rank, step, 3, 3])


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("idle", [False, True], ids=["all", "rank 0 idles"])
@per_rank()
def test_sparse_sums_equal_dense_ones(comm: ThreadComm, size: int, idle: bool) -> None:
    both = []
    for kind in (True, False):
        model = _model(kind)
        reducer = Reducer(lambda m=model: list(m.named_parameters()), comm, weight=0.5, factor=3.0, name=str(kind))  # type: ignore[misc]
        for step in range(3):
            model.zero_grad()
            reducer.begin()
            reducer.collect()
            if not (idle and comm.rank == 0 and size > 1):
                model(_indices(comm.rank, step)).pow(2).sum().backward()
            returned = reducer.finish()
        both.append(model)
        if kind:
            embedding = model[0].weight.grad
            assert embedding is not None and embedding.is_sparse
            assert any(t.data_ptr() == embedding._values().data_ptr() for t in returned), "clipping reaches it"
            assert len(embedding._values()) < 10, "only rows that were used"
    for ours, dense in zip(both[0].parameters(), both[1].parameters(), strict=True):
        assert ours.grad is not None and dense.grad is not None
        torch.testing.assert_close(ours.grad.to_dense(), dense.grad)


def test_one_rank_alone_keeps_it_sparse_too() -> None:
    model = _model(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = make_engine(optimizer, model, SoloComm(), "none")
    for used in (True, False):
        engine.begin(1)
        engine.backward(model(_indices(0, 1)).sum() if used else model[1](torch.ones(1, 3)).sum())
        gradients = engine.finish()
        gradient = model[0].weight.grad
        assert gradient is not None and gradient.is_sparse
        assert len(gradient._values()) == (3 if used else 0)
        assert len(gradients) == 3
        engine.step()
