"""The plugin of pytest that `tests.runner` loads: records outcomes, chooses and orders tests, keeps a deadline.

Each process that runs tests by itself, and the controller of pytest-xdist, appends lines of JSON to ``--results FILE``:
which tests it has, which one it begins, and the outcome of each. A test without an outcome was lost with its process.

Libraries rejected: pytest-rerunfailures reruns a test at once, in the process and beside the load in which it failed.
pytest-json-report holds its results until the end, so that a process that dies leaves none.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadGroupScheduling
from xdist.workermanage import WorkerController

from tests.runner.order import OF_HOSTS
from tests.support.jobs_started import job_of

NOT_RUN = "not run"
SLOW = "slow"
"""A property of outcomes: their keywords have the ids of parameters, too."""
RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
_started: list[str] = []
"""Jobs that the test under way has started."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tests.runner")
    group.addoption("--results", metavar="FILE", help="append a line of JSON for each outcome")
    group.addoption("--listed", metavar="FILE", help="run only the tests whose ids are in this JSON list")
    group.addoption("--order", metavar="FILE", help="JSON: the slow tests in their order, with their seconds")
    group.addoption("--deadline", type=float, metavar="TIME", help="begin no slow test that would end after this time")
    group.addoption("--jobs-at-most", type=int, metavar="N", help="fail where fast tests start more jobs; list them")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.jobs_at_most is not None:
        sys.addaudithook(_see)
    config.pluginmanager.register(_Runner(config), "tests.runner")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduler:
    return Scheduler(config, log)


class Scheduler(LoadGroupScheduling):  # type: ignore[misc]
    """The scheduler of pytest-xdist for groups, but for a process that dies: version 3.8.0 then waits forever.

    There the process that takes over the last tests waits for more of them. And the test in which the old process died
    is not handed out a second time here: `tests.runner` runs it again later.
    """

    def remove_node(self, node: WorkerController) -> str | None:
        """Return the test in which a process died; queue what else it had."""
        units = self.assigned_work.pop(node)
        left = [(unit, nodeid) for unit in units.values() for nodeid, done in unit.items() if not done]
        if not left:
            return None
        unit, died_in = left[0]
        unit[died_in] = True
        self.workqueue.update({scope: unit for scope, unit in units.items() if not all(unit.values())})
        for other in self.assigned_work:
            self._reschedule(other)
        return died_in

    def _reschedule(self, node: WorkerController) -> None:
        super()._reschedule(node)
        if not self.workqueue:
            node.shutdown()  # it ends when it has run what it has


def plain(nodeid: str) -> str:
    """Return the id of a test without the group that pytest-xdist appends."""
    return nodeid.rpartition("@")[0] if nodeid.rfind("@") > nodeid.rfind("]") else nodeid


class _Runner:
    def __init__(self, config: pytest.Config) -> None:
        option = config.option
        self._controls = not hasattr(config, "workerinput")
        self._results = Path(f"{option.results}.rank{RANK}" if RANK else option.results) if option.results else None
        self._listed = set(json.loads(Path(option.listed).read_text())) if option.listed else None
        self._order: dict[str, float] | None = json.loads(Path(option.order).read_text()) if option.order else None
        self._deadline: float | None = option.deadline
        self._most: int | None = option.jobs_at_most
        self._jobs: list[tuple[str, str]] = []
        self._spent_s: dict[str, float] = {}
        self._said_tests = False

    def _write(self, **line: Any) -> None:
        if self._results is not None and self._controls:
            with self._results.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self._listed is not None:
            left = [item for item in items if plain(item.nodeid) not in self._listed]
            config.hook.pytest_deselected(items=left)
            items[:] = [item for item in items if plain(item.nodeid) in self._listed]
        if self._order is not None:
            places = {nodeid: place for place, nodeid in enumerate(self._order)}

            def place(item: pytest.Item) -> tuple[int, int]:
                kind = 0 if item.nodeid.startswith(OF_HOSTS) else 2 if _is_slow(item) else 1
                return kind, places.get(plain(item.nodeid), -1) if kind != 1 else 0

            items.sort(key=place)
            _keep_files_together(items)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._note_tests([item.nodeid for item in session.items])

    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self._note_tests(ids)

    def _note_tests(self, ids: list[str]) -> None:
        if ids and not self._said_tests:
            self._said_tests = True
            self._write(tests=[plain(nodeid) for nodeid in ids])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self._deadline is not None and _is_slow(item):
            expected_s = 2 * (self._order or {}).get(plain(item.nodeid), 0.0)
            if time.time() + expected_s > self._deadline:
                item.user_properties.append((NOT_RUN, True))
                pytest.skip(f"{NOT_RUN}: the deadline")

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        if _is_slow(item) and (SLOW, True) not in item.user_properties:
            item.user_properties.append((SLOW, True))
        item.user_properties += [("job", job) for job in _started]
        _started.clear()
        yield

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(begins=plain(nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = plain(report.nodeid)
        self._spent_s[name] = self._spent_s.get(name, 0.0) + report.duration
        properties = list(report.user_properties)
        is_slow = (SLOW, True) in properties
        if report.when == "teardown" and not is_slow:
            self._jobs += [(name, str(job)) for kind, job in properties if kind == "job"]
        if report.failed or report.when == "call" or (report.when == "setup" and report.skipped):
            outcome = NOT_RUN if (NOT_RUN, True) in properties else str(report.outcome)
            error = _first_error(report) if report.failed else None
            self._write(test=name, outcome=outcome, slow=is_slow, error=error)
        if report.when == "teardown":
            self._write(test=name, seconds=round(self._spent_s.pop(name), 2))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(test=report.nodeid, outcome="failed", slow=False, error=_first_error(report))

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        if report.when == "setup" and (NOT_RUN, True) in list(report.user_properties):
            return NOT_RUN, "n", "NOT RUN"
        return None

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._most is not None:
            terminalreporter.section(f"{len(self._jobs)} jobs were started, at most {self._most} are meant")
            for test, job in self._jobs:
                terminalreporter.write_line(f"{test}: {job}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._most is not None and len(self._jobs) > self._most:
            self._write(test="the number of jobs", outcome="failed", slow=False, error=f"{len(self._jobs)} jobs")
            if session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _keep_files_together(items: list[pytest.Item]) -> None:
    """In each group of pytest-xdist, let tests of a file follow its first one: else it makes its fixtures again."""
    first: dict[tuple[str, Path], int] = {}

    def place(number: int, item: pytest.Item) -> int:
        group = item.get_closest_marker("xdist_group")
        return first.setdefault((_group_name(group), item.path), number) if group else number

    places = [place(number, item) for number, item in enumerate(items)]
    items[:] = [items[number] for number in sorted(range(len(items)), key=places.__getitem__)]


def _group_name(group: pytest.Mark) -> str:
    return str(group.args[0] if group.args else group.kwargs["name"])


def _is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


def _first_error(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the line of a failure that says what is wrong."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(crash.message).splitlines()[:1] if crash else report.longreprtext.splitlines()[-1:]
    return text[0][:300] if text else "no message"


def _see(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen" and (job := job_of(arguments[1])) is not None:
        _started.append(job)
