"""The norm of a gradient that ranks hold in parts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hvdtrain.engine.divisible import norm_of_parts
from hvdtrain.state.exchange_state import Owned
from hvdtrain.state.pieces import Place
from tests.support.thread_comm import ThreadComm, per_rank


@per_rank(3)
def test_what_several_ranks_hold_counts_once(comm: ThreadComm) -> None:
    """All hold the first; ranks 0 and 1 hold the second, and rank 2 holds the rest of it, without a gradient yet."""
    everywhere, part = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(2, 3))
    everywhere.grad = torch.full((4,), 3.0)
    first = comm.rank < 2
    if first:
        part.grad = torch.full((2, 3), 2.0)
    place = Place((4, 3), (0, 0), (0, 1)) if first else Place((4, 3), (2, 0), (2,))
    owned = {"everywhere": Owned(everywhere), "part": Owned(part, place)}
    found = norm_of_parts(owned, comm, nn.ParameterList([everywhere]))
    assert found.item() == pytest.approx((4 * 9 + 6 * 4) ** 0.5)
