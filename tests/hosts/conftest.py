"""Tests on two real hosts: skipped where there is no right to make them, required in CI."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.two_hosts import TwoHosts, UnavailableError, two_hosts


@pytest.fixture(scope="session")
def shared() -> Iterator[TwoHosts]:
    """The hosts of all tests."""
    try:
        with two_hosts() as pair:
            yield pair
    except UnavailableError as problem:
        if "CI" in os.environ:
            pytest.fail(f"{problem} (CI needs root, and what .ci/run installs)")
        pytest.skip(str(problem))


@pytest.fixture
def hosts(shared: TwoHosts) -> Iterator[TwoHosts]:
    """The same, their link whole and as fast as it can before and after a test."""
    yield shared
    shared.throttle(None)
    shared.mend()
