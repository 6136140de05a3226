"""Every error of rank 0 reaches all ranks, so that no rank waits in a broadcast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import on_rank_0
from hvdtrain.errors import DataError, HvdtrainError
from hvdtrain.observe.failure.fault import fault
from tests.support.thread_comm import on_ranks


class _SpecialDataError(DataError):
    """A type that the other ranks do not know."""


def _fail(error: Exception) -> Callable[[], Any]:
    def fail() -> None:
        raise error

    return fail


def _outcomes(action: Callable[[], Any], size: int) -> list[tuple[type[BaseException], str, bool]]:
    def body(comm: Comm) -> tuple[type[BaseException], str, bool]:
        try:
            on_rank_0(comm, action, name="action")
        except Exception as error:
            assert fault(error).consequence == str(error).startswith("rank 0 failed"), "rank 0 itself is to blame"
            return type(error), str(error), getattr(error, "everywhere", False)
        raise AssertionError("no error")

    return on_ranks(size, body)


@pytest.mark.parametrize("size", [1, 3])
def test_an_unknown_error_is_itself_on_rank_0_and_named_on_the_others(size: int) -> None:
    others = (HvdtrainError, "rank 0 failed: KeyError: 'lost'", False)
    assert _outcomes(_fail(KeyError("lost")), size) == [(KeyError, "'lost'", False), *[others] * (size - 1)]


def test_known_errors_are_equal_on_all_ranks() -> None:
    assert _outcomes(_fail(DataError("no data")), 2) == [(DataError, "no data", True)] * 2
    assert _outcomes(_fail(_SpecialDataError("no data")), 2) == [(DataError, "no data", True)] * 2
    assert _outcomes(_fail(PermissionError("not yours")), 2) == [(HvdtrainError, "not yours", True)] * 2


def test_a_result_that_json_cannot_hold() -> None:
    on_0, on_1 = _outcomes(lambda: object(), 2)
    assert on_0[0] is TypeError
    assert on_1[0] is HvdtrainError and "rank 0 failed: TypeError: " in on_1[1]
