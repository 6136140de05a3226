"""Tests on two real hosts: skipped where there is no right to make them, required in CI."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.host import required
from tests.support.two_hosts import TwoHosts, two_hosts


@pytest.fixture(scope="session")
def shared() -> Iterator[TwoHosts]:
    """The hosts of all tests."""
    with required(), two_hosts() as pair:
        yield pair


@pytest.fixture
def hosts(shared: TwoHosts) -> Iterator[TwoHosts]:
    """The same, their link whole and as fast as it can before and after a test."""
    yield shared
    shared.throttle(None)
    shared.mend()
