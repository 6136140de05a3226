"""Shared by all tests."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

settings.register_profile("shared", deadline=None)  # machines are shared: an example may take any time
settings.load_profile("shared")

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Under mpirun let rank 0 speak; another rank is heard when a test fails on it."""
    if RANK:
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write = reporter.write_line = reporter._tw.write = lambda *a, **k: None


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item):  # type: ignore[no-untyped-def]
    outcome = yield
    report = outcome.get_result()
    if RANK and report.failed:
        os.write(2, f"rank {RANK}: {item.nodeid}\n{report.longreprtext}\n".encode())
