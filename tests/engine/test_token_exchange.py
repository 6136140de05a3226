"""The exchange of tokens with their experts, on threads: results and gradients are those of one rank."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from hvdtrain.comm.solo import SoloComm
from hvdtrain.engine import token_exchange
from hvdtrain.engine.token_exchange import TokenExchange, exchange_rows, rows_among, rows_by_comm
from tests.support.thread_comm import ThreadComm, on_ranks, per_rank

EXPERTS, WIDTH = 8, 6


class Experts:
    """Experts that multiply by a matrix; `begin` is the id of the first."""

    def __init__(self, weights_EDD: Tensor, begin: int, count: int) -> None:
        self.weights = weights_EDD[begin : begin + count].clone().requires_grad_()
        self.num_experts = count
        self.rows = 0

    def forward(self, tokens_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        self.rows += len(tokens_TD)
        if not len(tokens_TD):  # a loop over experts adds nothing
            return torch.zeros_like(tokens_TD)
        chosen_TKDD = self.weights[experts_TK]
        outputs_TKD = torch.einsum("td,tkdc->tkc", tokens_TD, chosen_TKDD).tanh()
        return (outputs_TKD * weights_TK.unsqueeze(-1)).sum(dim=1)


def _inputs(rank: int, tokens: int, choice: str) -> tuple[Tensor, Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(rank)
    hidden = torch.randn(tokens, WIDTH, generator=numbers)
    scores = torch.rand(tokens, EXPERTS, generator=numbers)
    if choice == "one rank":  # all tokens go to the experts of rank 0
        scores[:, :2] += 10
    weights, experts = scores.topk(2)
    return hidden.requires_grad_(), experts, weights.requires_grad_()


@pytest.mark.parametrize("choice", ["any", "one rank"])
@pytest.mark.parametrize(("size", "tokens"), [(2, (5, 3)), (4, (4, 0, 7, 1)), (4, (3, 3, 3, 3))])
def test_results_and_gradients_are_those_of_all_experts_on_one_rank(
    size: int, tokens: tuple[int, ...], choice: str
) -> None:
    every_EDD = torch.randn(EXPERTS, WIDTH, WIDTH, generator=torch.Generator().manual_seed(99))
    whole = Experts(every_EDD, 0, EXPERTS)
    expected = []
    for rank in range(size):
        hidden, experts, weights = _inputs(rank, tokens[rank], choice)
        if not tokens[rank]:
            expected.append((hidden.detach(), hidden.detach(), weights.detach()))
            continue
        out = whole.forward(hidden, experts, weights)
        (out * torch.arange(WIDTH)).sum().backward()  # type: ignore[no-untyped-call]
        expected.append((out.detach(), hidden.grad, weights.grad))

    def body(comm: ThreadComm) -> tuple[Experts, Tensor, Tensor | None, Tensor | None]:
        local = EXPERTS // size
        own = Experts(every_EDD, comm.rank * local, local)
        mesh = SimpleNamespace(size=lambda: size)
        exchange = TokenExchange(rows_by_comm(comm), own, mesh, None)
        hidden, experts, weights = _inputs(comm.rank, tokens[comm.rank], choice)
        out = exchange(hidden, experts, weights)
        (out * torch.arange(WIDTH)).sum().backward()  # type: ignore[no-untyped-call]
        return own, out.detach(), hidden.grad, weights.grad

    found = on_ranks(size, body)
    assert whole.weights.grad is not None
    for rank, (own, *tensors) in enumerate(found):
        for ours, theirs in zip(tensors, expected[rank], strict=True):
            torch.testing.assert_close(ours, theirs)
        assert own.weights.grad is not None  # also without a token
        torch.testing.assert_close(own.weights.grad, whole.weights.grad[rank * own.num_experts :][: own.num_experts])
    pairs = sum(own.rows for own, *_ in found)
    empty = sum(own.rows == 1 and choice == "one rank" and rank > 0 for rank, (own, *_) in enumerate(found))
    assert pairs - empty == 2 * sum(tokens)  # no token is dropped, none is sent twice


@pytest.mark.parametrize("by_torch", [True, False])
def test_where_torch_exchanges_parameters_on_gpus_it_exchanges_activations(
    by_torch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Horovod begins its collectives in another order than torch."""
    monkeypatch.setattr(token_exchange, "by_nccl_of_horovod", lambda comm, device: True)
    monkeypatch.setattr(token_exchange, "lasting_group", lambda comm, ranks, use: None)
    rows = rows_among(SoloComm(), [0], ["host"], torch.device("cpu"), "experts", by_torch=by_torch)
    assert rows.__qualname__.partition(".")[0] == ("rows_by_torch" if by_torch else "rows_by_comm")


@per_rank(2)
def test_ranks_that_share_a_gpu_exchange_by_their_communicator(comm: ThreadComm) -> None:
    """NCCL does not support it. Torch has no group of threads."""
    comm.through_host = True  # type: ignore[attr-defined]
    rows = rows_among(comm, [0, 1], ["host", "host"], torch.device("cpu"), "sequences")
    found = exchange_rows(torch.tensor([1.0, 2.0]) + 10 * comm.rank, [1, 1], [1, 1], rows)
    assert found.tolist() == [1 + comm.rank, 11 + comm.rank]
