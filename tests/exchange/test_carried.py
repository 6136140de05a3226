"""What compression owes is not lost where parameters are frozen for a while, or ranks become others."""

from __future__ import annotations

import torch
from torch import nn

from hvdtrain.compression.table import parse
from hvdtrain.exchange.carried import Carried
from hvdtrain.exchange.reducer import Reducer
from tests.support.thread_comm import ThreadComm, on_ranks

TENSORS = {"a/residual": torch.ones(2), "a/powersgd_q": torch.ones(3), "b.c/residual": torch.full((2,), 2.0)}


def test_what_is_owed_is_told_from_what_was_learned() -> None:
    assert Carried(TENSORS, 2).owed(3) == Carried({k: TENSORS[k] for k in ("a/residual", "b.c/residual")}, 3)


def test_the_rest_keeps_its_sum_over_ranks() -> None:
    rest = Carried(TENSORS, 4).without({"a"}, 2)
    assert (list(rest.tensors), rest.ranks) == (["b.c/residual"], 2)
    assert 2 * rest.tensors["b.c/residual"].sum() == 4 * TENSORS["b.c/residual"].sum()


def test_only_what_is_owed_follows_the_loss_scale() -> None:
    tensors = {key: t.clone() for key, t in TENSORS.items()}
    Carried(tensors, 2).rescale(0.5)
    assert tensors["b.c/residual"].tolist() == [1.0, 1.0]
    assert torch.equal(tensors["a/powersgd_q"], TENSORS["a/powersgd_q"])


def test_a_parameter_that_was_frozen_for_a_while_gets_what_it_is_owed() -> None:
    """Top-k of one element a step: most of the gradient is owed when the layer freezes."""

    def body(comm: ThreadComm) -> float:
        model = nn.ParameterList([nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))])
        reducer = Reducer(
            lambda: [(n, p) for n, p in model.named_parameters() if p.requires_grad], comm, parse("topk:0.01")
        )
        total = torch.zeros(8)
        for step in range(60):
            model[1].requires_grad_(not 10 <= step < 20)
            model.zero_grad()
            reducer.begin()
            reducer.collect()
            scale = 1.0 if step < 10 else 0.0
            sum((p * scale).sum() for p in model if p.requires_grad).backward()  # type: ignore[union-attr]
            reducer.finish()
            if model[1].grad is not None:
                total += model[1].grad
            reducer.commit(applied=True)
        return float(total.sum())

    assert on_ranks(2, body) == [2 * 8 * 10.0] * 2
