"""Tests on a real Slurm: skipped where it is not installed or may not be started, required in CI."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.slurm import Slurm, UnavailableError, one_node, slurm_on
from tests.support.two_hosts import two_hosts


@contextmanager
def _required() -> Iterator[None]:
    try:
        yield
    except UnavailableError as problem:
        if "CI" in os.environ:
            pytest.fail(f"{problem} (CI needs root, and what .ci/run installs)")
        pytest.skip(str(problem))


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """One node."""
    with _required(), one_node() as started:
        yield started


@pytest.fixture(scope="session")
def two_nodes() -> Iterator[Slurm]:
    """Two nodes, ``a`` and ``b``, each with a network of its own."""
    with _required(), two_hosts() as hosts, slurm_on([hosts.a, hosts.b]) as started:
        yield started
