"""Shared by all tests."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from hvdtrain.config import parse
from tests.support.gallery import Gallery
from tests.support.jobs_started import job_of
from tests.support.tally import OUTCOMES

parse.make_parser = lru_cache(maxsize=4)(parse.make_parser)  # a tenth of the computing of fast tests, otherwise
settings.register_profile("shared", deadline=None)  # machines are shared: an example may take any time
settings.load_profile("shared")

os.environ["XDG_CONFIG_HOME"] = str(Path(__file__).with_name("no_config"))  # no profile of a site applies

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
_BEGAN = time.monotonic()
_started: list[str] = []
"""Jobs that the test under way has started."""
_jobs: list[tuple[str, str]] = []
"""All of this test run, with the test that started each."""


def _see(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen" and (job := job_of(arguments[1])) is not None:
        _started.append(job)


sys.addaudithook(_see)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tally", metavar="FILE", help="add a line of JSON that counts outcomes")
    parser.addoption("--jobs-at-most", type=int, metavar="N", help="fail where tests start more jobs; list them")


_OF_HOSTS = ("hosts", "slurm")
"""Folders whose tests need other hosts, or a scheduler: all by one process, so that there is one of each."""


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.relative_to(here).parts[0] in _OF_HOSTS:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.xdist_group("hosts"))
        elif "gallery" in getattr(item, "fixturenames", ()):  # others would wait while one process makes a recording
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


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
    item.user_properties += [("job", job) for job in _started]
    _started.clear()
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if RANK and report.failed:
        os.write(2, f"rank {RANK}: {item.nodeid}\n{report.longreprtext}\n".encode())


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        _jobs.extend((report.nodeid, str(job)) for name, job in report.user_properties if name == "job")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if (tally := config.getoption("--tally")) and not RANK and not hasattr(config, "workerinput"):
        counts = {kind: len(found) for kind, found in terminalreporter.stats.items() if kind in OUTCOMES}
        with Path(tally).open("a") as file:
            file.write(json.dumps({**counts, "seconds": time.monotonic() - _BEGAN}) + "\n")
    if (most := config.getoption("--jobs-at-most")) is not None:
        terminalreporter.section(f"{len(_jobs)} jobs were started, at most {most} are meant")
        for test, job in _jobs:
            terminalreporter.write_line(f"{test}: {job}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    most = session.config.getoption("--jobs-at-most")
    if most is not None and len(_jobs) > most and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> Gallery:
    """Recorded runs, one set for all processes of a test run: in the folder GALLERY, if that is set."""
    if folder := os.environ.get("GALLERY"):
        return Gallery(Path(folder))
    base = tmp_path_factory.getbasetemp()
    return Gallery((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "gallery")
