"""The communicator of a real job keeps the contract: HorovodComm under mpirun."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hvdtrain.comm.base import Comm
from tests.support.contract import CLAUSES


@pytest.mark.parametrize("clause", CLAUSES, ids=lambda c: c.__name__)
def test_job(clause: Callable[[Comm], None], job: Comm) -> None:
    clause(job)


@pytest.mark.parametrize("clause", CLAUSES, ids=lambda c: c.__name__)
def test_copies_on_the_host(clause: Callable[[Comm], None], job: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where ranks share a CUDA device."""
    if job.size == 1:
        pytest.skip("one rank shares no device")
    monkeypatch.setattr(job, "through_host", True)
    clause(job)
