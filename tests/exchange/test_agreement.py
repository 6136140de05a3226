"""What ranks check together before an exchange."""

from __future__ import annotations

import pytest

from hvdtrain.errors import LaunchError
from hvdtrain.exchange.agreement import check_same_names
from tests.support.thread_comm import ThreadComm, on_ranks


@pytest.mark.parametrize("other", [["a"], ["b", "a"], ["a", "c"], []])
def test_ranks_that_train_different_parameters_all_raise(other: list[str]) -> None:
    def body(comm: ThreadComm) -> str:
        check_same_names(comm, ["a", "b"], name="same")
        with pytest.raises(LaunchError, match="the ranks train different parameters") as caught:
            check_same_names(comm, other if comm.rank == 1 else ["a", "b"], name="other")
        return caught.value.found

    assert on_ranks(2, body) == [f"2 on rank 0, {len(other)} on rank 1"] * 2
