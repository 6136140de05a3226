"""Shared by all tests."""

from __future__ import annotations

import gc
import math
import os
import random
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import settings

from hvdtrain.config import parse
from hvdtrain.exchange import norms
from hvdtrain.plan import shards
from tests.runner.order import OF_HOSTS
from tests.support.gallery import Gallery

parse.make_parser = lru_cache(maxsize=4)(parse.make_parser)  # a tenth of the computing of fast tests, otherwise
settings.register_profile("shared", deadline=None)  # machines are shared: an example may take any time
settings.load_profile("shared")

os.fsync = lambda file: None  # no power fails here, and each takes milliseconds

os.environ["XDG_CONFIG_HOME"] = str(Path(__file__).with_name("no_config"))  # no profile of a site applies

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if (some := item.get_closest_marker("some")) and not _is_one_of(item, *some.args):
            item.add_marker(pytest.mark.slow)
        if item.nodeid.startswith(OF_HOSTS):
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.xdist_group("hosts"))
        elif "gallery" in getattr(item, "fixturenames", ()):  # others would wait while one process makes a recording
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


def _is_one_of(item: pytest.Item, count: int) -> bool:
    """Whether a test is one of the `count` variants of its function that are not slow: always the same."""
    total = math.prod(len(mark.args[1]) for mark in item.iter_markers("parametrize"))
    (place,) = set(item.callspec.indices.values())  # type: ignore[attr-defined]
    return place in random.Random(item.nodeid.partition("[")[0]).sample(range(total), min(count, total))


def pytest_collection_finish(session: pytest.Session) -> None:
    """See that the groups took effect: else each process would make hosts and images of its own."""
    gc.collect()
    gc.freeze()  # what was imported so far: later collections pass it by
    marked = [item for item in session.items if item.get_closest_marker("xdist_group")]
    if getattr(session.config.option, "loadgroup", False) and any("@" not in item.nodeid for item in marked):
        raise pytest.UsageError("this pytest-xdist has not marked the groups of this pytest's tests")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Under mpirun let rank 0 speak; another rank is heard when a test fails on it."""
    if RANK:
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write = reporter.write_line = reporter._tw.write = lambda *a, **k: None


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if RANK and report.failed:
        os.write(2, f"rank {RANK}: {item.nodeid}\n{report.longreprtext}\n".encode())


@pytest.fixture
def elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks that divide the optimizer divide rows, too, as if these were long."""
    monkeypatch.setattr(shards, "_CHUNK", 120)
    monkeypatch.setattr(shards, "_MOST_CHUNKS", 1 << 20)
    monkeypatch.setattr(norms, "_sizes_of", norms._sizes)


@pytest.fixture(scope="session")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> Gallery:
    """Recorded runs, one set for all processes of a test run: in the folder GALLERY, if that is set."""
    if folder := os.environ.get("GALLERY"):
        return Gallery(Path(folder))
    base = tmp_path_factory.getbasetemp()
    return Gallery((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "gallery")
