"""The watchdog: its timeout, and its reaction when other ranks die, fail or hang."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

import msgspec
import pytest

from hvdtrain.comm.solo import SoloComm
from hvdtrain.observe import watchdog as module
from hvdtrain.observe.failure import reporter as reporter_module
from hvdtrain.observe.failure.mailbox import Beat, Mailbox, open_mailbox
from hvdtrain.observe.failure.process_states import GONE, RUNNING, UNKNOWN, started
from hvdtrain.observe.failure.reporter import JobFacts, Reporter
from hvdtrain.observe.failure.statement import CURRENT, STALLED, RankProcess, StatementMaker, this_process
from hvdtrain.observe.output import FailureOutput
from hvdtrain.observe.watchdog import EXIT_FAILED, EXIT_STALLED, Patience, Watchdog
from hvdtrain.spans import Spans
from tests.support.launch import TIMEOUT_S


def test_patience_ends_where_nobody_moves() -> None:
    assert not Patience(600.0, 0.0).is_over(599.0, {}, 1000.0)
    assert Patience(600.0, 0.0).is_over(601.0, {}, 1000.0)
    assert Patience(600.0, 0.0).is_over(601.0, {1: Beat(1, 700.0)}, 1000.0)
    assert not Patience(600.0, 0.0).is_over(601.0, {1: Beat(1, 700.0), 2: Beat(1, 100.0)}, 1000.0), "rank 2 goes on"
    assert not Patience(0.0, 0.0).is_over(1e9, {}, 1000.0)
    assert [Patience(600.0, 0.0).is_over(t, {}, t, 3.0) for t in (1799.0, 1801.0)] == [False, True]


def test_a_beat_that_stays_the_same_grows_old() -> None:
    """A rank that was stopped says no more; its last word was that it made progress."""
    patience = Patience(600.0, 0.0)
    stopped = {1: Beat(7, 0.0)}
    assert [patience.is_over(t, stopped, t) for t in (20.0, 30.0, 601.0, 619.0, 620.0)] == [False] * 4 + [True]
    assert not patience.is_over(630.0, {1: Beat(8, 1.0)}, 630.0), "it goes on"


@pytest.mark.parametrize("poll_s", [1.0, 20.0])
def test_time_in_which_the_process_was_suspended_does_not_count(poll_s: float) -> None:
    """Looking seldom, as many ranks do, is not being suspended."""
    patience, looks = Patience(600.0, 0.0, poll_s=poll_s), [poll_s, 2 * poll_s, 3 * poll_s]
    assert [patience.idle_s(t, t) for t in looks] == looks
    assert patience.idle_s(5000.0, 5000.0) == 0.0, "it was stopped for more than an hour"
    assert patience.idle_s(5001.0, 5001.0) == 1.0
    assert patience.idle_s(0.25, 5002.0) == 0.25


class Job:
    """Rank 0 with its reporter, and rank 1 as a process, once a test looks at it; exit codes instead of an exit."""

    def __init__(self, folder: Path) -> None:
        mailbox = open_mailbox(folder, SoloComm(), this_process(0, "a"))
        facts = JobFacts(folder, folder, "again", lambda: None)
        self.spans = Spans()
        self.reporter = Reporter(mailbox, StatementMaker(mailbox.process, self.spans, {}), facts, FailureOutput())
        self.card = folder / "failure.txt"
        self.codes: list[int] = []
        self._ended = threading.Event()

    @cached_property
    def child(self) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        self.change_mailbox(
            ranks=(self.reporter.mailbox.process, RankProcess(1, "a", child.pid, started(child.pid) or 0))
        )
        self.change_mailbox(visible=frozenset({1}), reachable=frozenset({0, 1}))
        return child

    @property
    def mailbox_of_rank_1(self) -> Mailbox:
        return dataclasses.replace(self.reporter.mailbox, process=self.reporter.mailbox.ranks[1])

    def change_mailbox(self, **changes: object) -> None:
        self.reporter.mailbox = dataclasses.replace(self.reporter.mailbox, **changes)  # type: ignore[arg-type]

    def kill_rank_1(self) -> None:
        self.child.kill()
        self.child.wait()

    def report_from_rank_1(self) -> None:
        other = self.mailbox_of_rank_1
        other.post_statement(msgspec.structs.replace(self.reporter.statements.current(), process=other.process))
        other.mark_reported()

    def watch(self, timeout_s: float = 0.0, *, driven: bool = False) -> Watchdog:
        return Watchdog(self.reporter, timeout_s, self._end, driven=driven)

    def _end(self, code: int) -> None:
        self.codes.append(code)
        self._ended.set()

    def wait(self) -> int:
        """Return the exit code."""
        assert self._ended.wait(TIMEOUT_S)
        return self.codes[0]

    def looks(self) -> Callable[[], None]:
        """Let training make progress all the time; return what waits for some more looks of the watchdog."""
        looks = threading.Semaphore(0)
        self.idle_s(lambda: looks.release() or 0.0)  # type: ignore[func-returns-value]

        def wait() -> None:
            for _ in range(5):
                assert looks.acquire(timeout=TIMEOUT_S)

        return wait

    def idle_s(self, since: Callable[[], float]) -> None:
        """Set how long there was no progress."""
        self.spans.idle_s = since  # type: ignore[method-assign]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr(module, "_POLL_S", 0.01)
    monkeypatch.setattr(module, "_REPORTED_GRACE_S", 0.0)
    monkeypatch.setattr(reporter_module, "_STATEMENTS_WAIT_S", 0.1)
    monkeypatch.setattr(reporter_module, "_DEAD_RANK_WAIT_S", 0.1)
    made = Job(tmp_path)
    yield made
    if "child" in vars(made):
        made.child.communicate()


@pytest.mark.parametrize("jump_s", [-1e7, -7200.0, 7200.0, 1e7])
def test_a_clock_that_is_set_ends_nothing_and_keeps_nothing_alive(
    jump_s: float, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 has left a beat and is stopped; it runs on another host, so that its process is not seen."""
    own = job.reporter.mailbox.process
    job.change_mailbox(ranks=(own, RankProcess(1, "b", 1, 1)), reachable=frozenset({0, 1}))
    job.mailbox_of_rank_1.post_heartbeat(3, 0.0, {"time": time.time()})
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    watchdog = job.watch(600.0)
    watchdog._first_step, job.spans.step = 1, 3
    since = now[0]
    job.idle_s(lambda: now[0] - since)
    wall = time.time()
    while now[0] < since + 590.0:
        now[0] += 2.0
        jumped = jump_s if now[0] > since + 300.0 else 0.0
        monkeypatch.setattr(module.time, "time", lambda jumped=jumped: wall + jumped + now[0])  # type: ignore[misc]
        watchdog._poll()
    assert not job.codes
    monkeypatch.setattr(job.reporter, "report_stall", lambda: None)
    while now[0] < since + 640.0:
        now[0] += 2.0
        watchdog._poll()
    assert job.codes[0] == EXIT_STALLED


def test_under_a_driver_no_rank_counts_as_missing_and_no_card_is_written(job: Job) -> None:
    wait_for_looks = job.looks()
    job.kill_rank_1()
    with job.watch(driven=True):
        wait_for_looks()
        job.report_from_rank_1()
        wait_for_looks()
    assert not job.codes and not job.card.exists()


def test_a_run_without_progress_is_ended_and_reported(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    with job.spans("data"), job.watch(0.05):
        assert job.wait() == EXIT_STALLED
    assert "in data before the first step" in capfd.readouterr().err
    assert job.reporter.mailbox.statements({})[0].kind == STALLED


def test_a_run_that_makes_progress_is_left_alone_also_when_another_rank_came_to_its_end(job: Job) -> None:
    wait_for_looks = job.looks()
    assert job.child.poll() is None
    with job.watch(0.001):
        job.mailbox_of_rank_1.mark_finished()
        job.child.communicate()
        wait_for_looks()
    assert not job.codes and not job.reporter.mailbox.has_statements()
    assert job.reporter.mailbox.heartbeats()[0]["step"] == 0


@pytest.mark.parametrize("lowest_descriptor", [0, 1050])
def test_a_dead_rank_is_reported(
    lowest_descriptor: int, job: Job, capfd: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """Also with more open files than select() can watch."""
    limits = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1100:
        pytest.skip("this host allows no more than 1100 open files")
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits))
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1100), hard))
    assert job.child.poll() is None
    watchdog = job.watch()
    low, watchdog._wake_read = watchdog._wake_read, fcntl.fcntl(watchdog._wake_read, fcntl.F_DUPFD, lowest_descriptor)
    os.close(low)
    with watchdog:
        job.kill_rank_1()
        assert job.wait() == EXIT_FAILED
    said = capfd.readouterr().err
    assert "rank 1 on a ended without an error message" in said and "watchdog failed" not in said
    assert job.card.exists()


def test_another_ranks_failure_is_answered_once_and_followed(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    assert job.child.poll() is None
    with job.watch():
        job.report_from_rank_1()
        assert job.wait() == EXIT_FAILED
    assert {s.process.rank: s.kind for s in job.reporter.mailbox.statements({})} == {0: CURRENT, 1: CURRENT}
    assert "failure.txt" in capfd.readouterr().err


def test_a_signal_wakes_it_at_once(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """mpirun leaves a second; the training thread's handler runs too."""
    monkeypatch.setattr(module, "_POLL_S", 1000.0)
    noted: list[int] = []
    former = signal.signal(signal.SIGTERM, lambda number, frame: noted.append(number))
    assert job.child.poll() is None
    try:
        with job.watch():
            job.kill_rank_1()
            os.kill(os.getpid(), signal.SIGTERM)
            job.wait()
    finally:
        signal.signal(signal.SIGTERM, former)
    assert job.codes == [EXIT_FAILED] and noted == [signal.SIGTERM]
    assert signal.set_wakeup_fd(-1) == -1, "the signals are given back"


def test_a_fault_of_its_own_harms_nobody_and_it_is_silent_once_an_error_was_raised(
    job: Job, capfd: pytest.CaptureFixture[str]
) -> None:
    job.idle_s(lambda: 1 // 0)
    for raised in (False, True):
        job.reporter.error_raised = raised
        with job.watch() as watchdog:
            watchdog._thread.join(TIMEOUT_S)
        assert ("the watchdog failed" in capfd.readouterr().err) != raised
    assert not job.codes


def test_one_fault_is_not_the_end_of_it(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    looks: list[int] = []

    def sometimes() -> float:
        looks.append(len(looks))
        if len(looks) % 2:
            raise OSError("too many open files")
        return 1000.0 if len(looks) > 20 else 0.0

    job.idle_s(sometimes)
    with job.watch(0.05):
        assert job.wait() == EXIT_STALLED
    assert "watchdog failed" not in capfd.readouterr().err


def test_a_rank_is_missed_only_when_it_is_found_dead_twice(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([{1: GONE}, {1: RUNNING}, {1: GONE}, {}, {1: UNKNOWN}, {1: GONE}, {1: GONE}])
    monkeypatch.setattr(Mailbox, "states", lambda mailbox: next(found))
    watchdog = job.watch()
    assert [watchdog._is_rank_dead() for _ in range(7)] == [False] * 6 + [True]


def test_without_a_folder_a_dead_neighbour_is_seen_by_the_first_that_is_left_but_not_in_the_end(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.change_mailbox(folder=None)
    watchdog = job.watch()

    def missing(states: dict[int, str]) -> bool:
        watchdog._suspects.clear()
        monkeypatch.setattr(Mailbox, "states", lambda mailbox: states)
        return [watchdog._is_rank_dead() for _ in range(2)][1]

    assert missing({1: GONE, 2: RUNNING})
    job.change_mailbox(process=msgspec.structs.replace(job.reporter.mailbox.process, rank=2))
    assert missing({0: GONE, 1: GONE})
    assert not missing({0: RUNNING, 1: GONE}), "rank 0 says it"
    job.reporter.job.is_ending = lambda: True
    assert not missing({0: GONE, 1: GONE})


def test_first_steps_and_evaluations_have_three_times_the_limit(job: Job) -> None:
    watchdog, times = job.watch(600.0), []
    for step in (0, 51, 52, 53):  # it resumes after step 50
        job.spans.step = step
        times.append(watchdog._times())
    assert times == [3.0, 3.0, 3.0, 1.0]
    with job.spans("evaluation"), job.spans("forward"):
        assert watchdog._times() == 3.0


def test_no_progress_is_said_once_before_anything_ends(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    watchdog = job.watch(600.0)
    watchdog._first_step, job.spans.step = 1, 12
    with job.spans("forward"):
        for idle_s in (100.0, 299.0, 300.0, 400.0):
            watchdog._warn(idle_s)
    (line,) = capfd.readouterr().err.splitlines()
    assert all(part in line for part in ("rank 0", "300 s", "forward", "step 12", "600 s", "observe.stall_timeout_s"))
    watchdog._warn(0.0)  # it continues
    watchdog._warn(301.0)
    assert "301 s" in capfd.readouterr().err
    process = msgspec.structs.replace(job.reporter.statements.process, rank=3)
    job.reporter.statements = dataclasses.replace(job.reporter.statements, process=process)
    with job.spans("wait"):
        watchdog._warn(0.0)
        watchdog._warn(500.0)
    assert capfd.readouterr().err == "", "it waits for another rank"
