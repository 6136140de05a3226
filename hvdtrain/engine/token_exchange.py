"""Exchange rows of activations among ranks: tokens with the ranks that have their experts, by Horovod or torch.

The dispatch of transformers (`AllToAllEP`) is not used alone: it knows only torch's groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hvdtrain.comm.base import Comm
from hvdtrain.comm.mesh import comm_among
from hvdtrain.comm.solo import ImaginedComm
from hvdtrain.comm.torch_group import TorchComm, lasting_group
from hvdtrain.spans import Spans

Rows = Callable[[Tensor, list[int], list[int]], Tensor]
"""Sends shares of the rows of a tensor to the ranks, of the first sizes; returns those received, of the second."""


def rows_by_torch(group: dist.ProcessGroup) -> Rows:
    """Return an exchange among the ranks of a process group."""

    def exchange(sent: Tensor, given: list[int], received: list[int]) -> Tensor:
        found = sent.new_empty(sum(received), *sent.shape[1:])
        dist.all_to_all_single(found, sent.contiguous(), received, given, group=group)
        return found

    return exchange


def rows_by_comm(comm: Comm, prefix: str = "experts") -> Rows:
    """Return an exchange among the ranks of a communicator. All of them call it in the same order.

    `prefix`: of the names of its collectives.
    """
    numbers = count()

    def exchange(sent: Tensor, given: list[int], received: list[int]) -> Tensor:
        name = f"{prefix}/{next(numbers) % 2}"  # a name is in use until its collective was waited for
        return comm.alltoall(sent.detach().contiguous(), name=name, rows=given).wait()

    return exchange


def rows_among(
    comm: Comm,
    ranks: Sequence[int],
    hosts: Sequence[object],
    device: torch.device,
    prefix: str,
    spans: Spans | None = None,
    *,
    by_torch: bool = False,
) -> Rows:
    """Return an exchange among some ranks of a communicator, on a device. Collective: yes.

    It is torch's, but on GPUs under Horovod: NCCL needs one order of all collectives, which Horovod gives to its own.
    `by_torch`: torch has other exchanges in the same passes, so this must be torch's. And it is the communicator's
    where ranks share a GPU, which NCCL does not support.
    """
    through_host = getattr(comm, "through_host", False)
    by_horovod = not by_torch and by_nccl_of_horovod(comm, device)
    if through_host or by_horovod or isinstance(comm, ImaginedComm):
        rows = rows_by_comm(comm_among(comm, ranks, hosts), prefix)
    else:
        rows = rows_by_torch(lasting_group(comm, ranks, prefix))  # NCCL exchanges of one group wait for each other
    return rows if spans is None else partial(_timed, rows, spans)


def _timed(rows: Rows, spans: Spans, sent: Tensor, given: list[int], received: list[int]) -> Tensor:
    with spans.waiting_for(sent):
        return rows(sent, given, received)


def by_nccl_of_horovod(comm: Comm, device: torch.device) -> bool:
    """Return whether Horovod exchanges gradients on GPUs: in its own order, which torch's groups do not know."""
    return device.type == "cuda" and not isinstance(comm, TorchComm)


def exchange_rows(sent: Tensor, given: list[int], received: list[int], rows: Rows) -> Tensor:
    """Send shares of the rows of a tensor, as `Rows`; gradients go back the same way. Collective: yes."""
    return _Exchanged.apply(sent, given, received, rows)  # type: ignore[no-untyped-call,no-any-return]


class _Exchanged(torch.autograd.Function):
    """Rows that were exchanged; backward sends their gradients back."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, given: list[int], received: list[int], exchange: Rows) -> Tensor:
        ctx.given, ctx.received, ctx.exchange = given, received, exchange
        return exchange(sent, given, received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.exchange(gradients[0], ctx.received, ctx.given), None, None, None


class TokenExchange:
    """An implementation of expert parallelism for transformers' registry; see `EPImplementation` there.

    Each rank has the experts of a range of ids, and tokens of its own. A token goes to each of its experts, however
    many tokens an expert has: none is dropped.

    Args:
        experts: with the parameters of this rank's experts only.
        rows: exchange among the ranks that divide the experts.
        equal: whether to take each expert to have equally many tokens, whatever their ids; to count memory.
    """

    def __init__(self, rows: Rows, experts: Any, ep_mesh: Any, tp_mesh: Any, *, equal: bool = False) -> None:
        self._run, self._local, self._ranks, self._rows = experts.forward, experts.num_experts, ep_mesh.size(), rows
        self._loads = self._equal_loads if equal else self._exchanged_loads

    def __call__(self, tokens_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Return the weighted sum of the experts' outputs for each token (T, D).

        Args:
            tokens_TD: hidden states of this rank.
            experts_TK: ids of the experts of each token.
            weights_TK: weights of their outputs.
        """
        ids_P = experts_TK.reshape(-1)  # pairs of a token and an expert
        order_P = ids_P.argsort(stable=True)
        given, received, own_Q = self._loads(ids_P)
        sent_PD = tokens_TD[order_P // experts_TK.shape[1]]
        inputs_QD = exchange_rows(sent_PD, given, received, self._rows)
        outputs_QD = self._outputs(inputs_QD, own_Q)
        back_PD = exchange_rows(outputs_QD, received, given, self._rows)
        results_PD = torch.empty_like(back_PD).index_copy(0, order_P, back_PD)
        return (results_PD.view(*weights_TK.shape, tokens_TD.shape[1]) * weights_TK.unsqueeze(-1)).sum(dim=1)

    def _exchanged_loads(self, ids_P: Tensor) -> tuple[list[int], list[int], Tensor]:
        """Return the numbers of pairs for and from each rank, and which own expert each of the latter has."""
        counts_RE = torch.bincount(ids_P, minlength=self._ranks * self._local).view(self._ranks, self._local)
        with torch.no_grad():
            arriving_RE = self._rows(counts_RE, [1] * self._ranks, [1] * self._ranks)
        given, received = torch.stack([counts_RE.sum(dim=1), arriving_RE.sum(dim=1)]).tolist()
        own_Q = torch.arange(self._local, device=ids_P.device).repeat(self._ranks)
        return given, received, own_Q.repeat_interleave(arriving_RE.reshape(-1), output_size=sum(received))

    def _equal_loads(self, ids_P: Tensor) -> tuple[list[int], list[int], Tensor]:
        pairs = len(ids_P)
        shares = [pairs * (rank + 1) // self._ranks - pairs * rank // self._ranks for rank in range(self._ranks)]
        return shares, shares, torch.arange(pairs, device=ids_P.device) % self._local

    def _outputs(self, inputs_QD: Tensor, own_Q: Tensor) -> Tensor:
        """Run each row through its own expert. Without rows a zero runs, so that the experts have gradients."""
        if not len(inputs_QD):
            zeros_1D = inputs_QD.sum(dim=0, keepdim=True)
            return self._outputs(zeros_1D, own_Q.new_zeros(1))[:0]
        ones_Q1 = torch.ones(len(own_Q), 1, dtype=inputs_QD.dtype, device=inputs_QD.device)
        outputs: Tensor = self._run(inputs_QD, own_Q.unsqueeze(1), ones_Q1)
        return outputs
