"""Tests on a real Slurm: skipped where it is not installed or may not be started, required in CI."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.host import required
from tests.support.slurm import Slurm, one_node, slurm_on
from tests.support.two_hosts import two_hosts


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """One node."""
    with required(), one_node() as started:
        yield started


@pytest.fixture(scope="session")
def two_nodes() -> Iterator[Slurm]:
    """Two nodes, ``a`` and ``b``, each with a network of its own."""
    with required(), two_hosts() as hosts, slurm_on([hosts.a, hosts.b]) as started:
        yield started
