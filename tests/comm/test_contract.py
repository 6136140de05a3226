"""SoloComm and ThreadComm keep the contract; HorovodComm is tried in tests/parallel."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hvdtrain.comm.base import Comm
from hvdtrain.comm.solo import SoloComm
from tests.support.contract import CLAUSES
from tests.support.thread_comm import on_ranks


@pytest.mark.parametrize("clause", CLAUSES, ids=lambda c: c.__name__)
def test_solo(clause: Callable[[Comm], None]) -> None:
    clause(SoloComm())


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("clause", CLAUSES, ids=lambda c: c.__name__)
def test_threads(clause: Callable[[Comm], None], size: int) -> None:
    on_ranks(size, clause)
