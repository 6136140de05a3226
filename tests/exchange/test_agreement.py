"""What ranks check together before an exchange."""

from __future__ import annotations

import pytest

from hvdtrain.errors import LaunchError
from hvdtrain.exchange.agreement import check_same_names
from tests.support.thread_comm import ThreadComm, per_rank


@pytest.mark.parametrize("other", [["a"], ["b", "a"], ["a", "c"], []])
@per_rank(2)
def test_ranks_that_train_different_parameters_all_raise(comm: ThreadComm, other: list[str]) -> None:
    check_same_names(comm, ["a", "b"], name="same")
    with pytest.raises(LaunchError, match="different parameters") as caught:
        check_same_names(comm, other if comm.rank == 1 else ["a", "b"], name="other")
    assert caught.value.found == f"2 on rank 0, {len(other)} on rank 1"
