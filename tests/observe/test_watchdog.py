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
from pathlib import Path

import msgspec
import pytest

from hvdtrain.comm.solo import SoloComm
from hvdtrain.observe import watchdog as module
from hvdtrain.observe.failure import reporter as reporter_module
from hvdtrain.observe.failure.mailbox import open_mailbox
from hvdtrain.observe.failure.process_states import GONE, RUNNING, UNKNOWN, started
from hvdtrain.observe.failure.reporter import JobFacts, Reporter
from hvdtrain.observe.failure.statement import CURRENT, STALLED, RankProcess, StatementMaker, this_process
from hvdtrain.observe.output import FailureOutput
from hvdtrain.observe.watchdog import EXIT_FAILED, EXIT_STALLED, Patience, Watchdog
from hvdtrain.spans import Spans
from tests.support.launch import TIMEOUT_S


def _beat(number: int, idle_s: float) -> dict[str, float]:
    return {"beat": number, "idle_s": idle_s}


def test_patience_ends_where_nobody_moves() -> None:
    assert not Patience(600.0, 0.0).is_over(599.0, {}, 1000.0)
    assert Patience(600.0, 0.0).is_over(601.0, {}, 1000.0)
    assert Patience(600.0, 0.0).is_over(601.0, {1: _beat(1, 700.0), 2: {}}, 1000.0)
    assert not Patience(600.0, 0.0).is_over(601.0, {1: _beat(1, 700.0), 2: _beat(1, 100.0)}, 1000.0), "rank 2 goes on"
    assert not Patience(0.0, 0.0).is_over(1e9, {}, 1000.0)


def test_a_beat_that_stays_the_same_grows_old() -> None:
    """A rank that was stopped says no more; its last word was that it made progress."""
    patience = Patience(600.0, 0.0)
    stopped = {1: _beat(7, 0.0)}
    assert [patience.is_over(t, stopped, t) for t in (20.0, 30.0, 601.0, 619.0, 620.0)] == [False] * 4 + [True]
    assert not patience.is_over(630.0, {1: _beat(8, 1.0)}, 630.0), "it goes on"


@pytest.mark.parametrize("jump_s", [-1e7, -7200.0, 7200.0, 1e7])
def test_a_clock_that_is_set_ends_nothing_and_keeps_nothing_alive(
    jump_s: float, reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = _Ended()
    _alone_with_a_beat_of_rank_1(reporter, monkeypatch)
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    watchdog = Watchdog(reporter, 600.0, ended)
    watchdog._first_step, reporter.statements.spans.step = 1, 3
    since = now[0]
    reporter.statements.spans.idle_s = lambda: now[0] - since  # type: ignore[method-assign]
    wall = time.time()
    while now[0] < since + 590.0:
        now[0] += 2.0
        jumped = jump_s if now[0] > since + 300.0 else 0.0
        monkeypatch.setattr(module.time, "time", lambda jumped=jumped: wall + jumped + now[0])  # type: ignore[misc]
        watchdog._poll()
    assert not ended.codes
    monkeypatch.setattr(reporter, "report_stall", lambda: None)
    while now[0] < since + 640.0:
        now[0] += 2.0
        watchdog._poll()
    assert ended.codes[0] == EXIT_STALLED


def _alone_with_a_beat_of_rank_1(reporter: Reporter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 has left a beat and is stopped; it runs on another host, so that its process is not seen."""
    other = RankProcess(1, "b", 1, 1)
    reporter.mailbox = dataclasses.replace(
        reporter.mailbox, ranks=(reporter.mailbox.process, other), reachable=frozenset({0, 1})
    )
    dataclasses.replace(reporter.mailbox, process=other).post_heartbeat({"beat": 3, "idle_s": 0.0, "time": time.time()})


def test_under_a_driver_no_rank_counts_as_missing_and_no_card_is_written(
    reporter: Reporter, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_REPORTED_GRACE_S", 0.0)
    ended, wait_for_looks = _Ended(), _looks(reporter)
    _with(reporter, child)
    _kill(child)
    with Watchdog(reporter, 0.0, ended, driven=True):
        wait_for_looks()
        _report_from_rank_1(reporter)
        wait_for_looks()
    assert not ended.codes and not (reporter.job.absolute_dir / "failure.txt").exists()


@pytest.mark.parametrize("poll_s", [1.0, 20.0])
def test_time_in_which_the_process_was_suspended_does_not_count(poll_s: float) -> None:
    """Looking seldom, as many ranks do, is not being suspended."""
    patience, looks = Patience(600.0, 0.0, poll_s=poll_s), [poll_s, 2 * poll_s, 3 * poll_s]
    assert [patience.idle_s(t, t) for t in looks] == looks
    assert patience.idle_s(5000.0, 5000.0) == 0.0, "it was stopped for more than an hour"
    assert patience.idle_s(5001.0, 5001.0) == 1.0
    assert patience.idle_s(0.25, 5002.0) == 0.25


class _Ended:
    """Takes the exit code instead of ending the process."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self._event = threading.Event()

    def __call__(self, code: int) -> None:
        self.codes.append(code)
        self._event.set()

    def wait(self) -> None:
        assert self._event.wait(TIMEOUT_S)


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_POLL_S", 0.01)
    monkeypatch.setattr(reporter_module, "_STATEMENTS_WAIT_S", 0.1)
    monkeypatch.setattr(reporter_module, "_DEAD_RANK_WAIT_S", 0.1)


@pytest.fixture
def reporter(tmp_path: Path) -> Reporter:
    mailbox = open_mailbox(tmp_path, SoloComm(), this_process(0, "a"))
    job = JobFacts(tmp_path, tmp_path, "again", lambda: None)
    return Reporter(mailbox, StatementMaker(mailbox.process, Spans(), {}), job, FailureOutput())


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def _with(reporter: Reporter, child: subprocess.Popen[bytes]) -> Reporter:
    """The reporter of rank 0, whose rank 1 is `child`."""
    other = RankProcess(1, "a", child.pid, started(child.pid) or 0)
    reporter.mailbox = dataclasses.replace(
        reporter.mailbox, ranks=(reporter.mailbox.process, other), visible=frozenset({1}), reachable=frozenset({0, 1})
    )
    return reporter


def _report_from_rank_1(reporter: Reporter) -> None:
    other = dataclasses.replace(reporter.mailbox, process=reporter.mailbox.ranks[1])
    other.post_statement(msgspec.structs.replace(reporter.statements.current(), process=other.process))
    other.mark_reported()


def _kill(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()


def _looks(reporter: Reporter) -> Callable[[], None]:
    """Let the training thread make progress all the time; return what waits for some more looks of the watchdog."""
    looks = threading.Semaphore(0)
    reporter.statements.spans.idle_s = lambda: looks.release() or 0.0  # type: ignore[method-assign,func-returns-value]

    def wait() -> None:
        for _ in range(5):
            assert looks.acquire(timeout=TIMEOUT_S)

    return wait


def test_a_run_without_progress_is_ended_and_reported(reporter: Reporter, capfd: pytest.CaptureFixture[str]) -> None:
    ended = _Ended()
    with reporter.statements.spans("data"), Watchdog(reporter, 0.05, ended):
        ended.wait()
    assert ended.codes[0] == EXIT_STALLED
    assert "in data before the first step" in capfd.readouterr().err
    assert reporter.mailbox.statements({})[0].kind == STALLED


def test_a_run_that_makes_progress_is_left_alone(reporter: Reporter) -> None:
    ended, wait_for_looks = _Ended(), _looks(reporter)
    with Watchdog(reporter, 0.001, ended):
        wait_for_looks()
    assert not ended.codes and not reporter.mailbox.has_statements()
    assert reporter.mailbox.heartbeats()[0]["step"] == 0


def test_a_dead_rank_is_reported(
    reporter: Reporter, child: subprocess.Popen[bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    ended = _Ended()
    with Watchdog(_with(reporter, child), 0.0, ended):
        _kill(child)
        ended.wait()
    assert ended.codes[0] == EXIT_FAILED
    assert "rank 1 on a ended without an error message" in capfd.readouterr().err
    assert (reporter.job.absolute_dir / "failure.txt").exists()


def test_a_rank_that_came_to_its_end_is_not_missed(reporter: Reporter, child: subprocess.Popen[bytes]) -> None:
    ended, wait_for_looks = _Ended(), _looks(reporter)
    _with(reporter, child)
    with Watchdog(reporter, 0.0, ended):
        dataclasses.replace(reporter.mailbox, process=reporter.mailbox.ranks[1]).mark_finished()
        child.communicate()
        wait_for_looks()
    assert not ended.codes


def test_another_ranks_failure_is_answered_once_and_followed(
    reporter: Reporter,
    child: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(module, "_REPORTED_GRACE_S", 0.0)
    ended = _Ended()
    with Watchdog(_with(reporter, child), 0.0, ended):
        _report_from_rank_1(reporter)
        ended.wait()
    assert ended.codes[0] == EXIT_FAILED
    assert {s.process.rank: s.kind for s in reporter.mailbox.statements({})} == {0: CURRENT, 1: CURRENT}
    assert "the run failed, see" in capfd.readouterr().err


def test_a_signal_wakes_it_at_once(
    reporter: Reporter, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """mpirun leaves a second; the training thread's handler runs too."""
    monkeypatch.setattr(module, "_POLL_S", 1000.0)
    ended, noted = _Ended(), []
    former = signal.signal(signal.SIGTERM, lambda number, frame: noted.append(number))
    try:
        with Watchdog(_with(reporter, child), 0.0, ended):
            _kill(child)
            os.kill(os.getpid(), signal.SIGTERM)
            ended.wait()
    finally:
        signal.signal(signal.SIGTERM, former)
    assert ended.codes == [EXIT_FAILED] and noted == [signal.SIGTERM]
    assert signal.set_wakeup_fd(-1) == -1, "the signals are given back"


def test_a_fault_of_its_own_harms_nobody(reporter: Reporter, capfd: pytest.CaptureFixture[str]) -> None:
    ended = _Ended()
    reporter.statements.spans.idle_s = lambda: 1 // 0  # type: ignore[method-assign]
    with Watchdog(reporter, 0.0, ended) as watchdog:
        watchdog._thread.join(TIMEOUT_S)
    assert "the watchdog failed" in capfd.readouterr().err
    assert not ended.codes


def test_it_is_silent_once_an_error_was_raised(reporter: Reporter) -> None:
    ended = _Ended()
    reporter.error_raised = True
    with Watchdog(reporter, 0.001, ended) as watchdog:
        watchdog._thread.join(TIMEOUT_S)
    assert not ended.codes


def test_one_fault_is_not_the_end_of_it(reporter: Reporter, capfd: pytest.CaptureFixture[str]) -> None:
    ended, looks = _Ended(), list[int]()

    def sometimes() -> float:
        looks.append(len(looks))
        if len(looks) % 2:
            raise OSError("too many open files")
        return 1000.0 if len(looks) > 20 else 0.0

    reporter.statements.spans.idle_s = sometimes  # type: ignore[method-assign]
    with Watchdog(reporter, 0.05, ended):
        ended.wait()
    assert ended.codes[0] == EXIT_STALLED
    assert "watches no more" not in capfd.readouterr().err


def test_a_rank_is_missed_only_when_it_is_found_dead_twice(
    reporter: Reporter, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter([{1: GONE}, {1: RUNNING}, {1: GONE}, {}, {1: UNKNOWN}, {1: GONE}, {1: GONE}])
    monkeypatch.setattr(type(reporter.mailbox), "states", lambda mailbox: next(found, {1: GONE}))
    watchdog = Watchdog(_with(reporter, child), 0.0, _Ended())
    assert [watchdog._is_rank_dead() for _ in range(7)] == [False] * 6 + [True]


def test_it_works_with_file_descriptors_beyond_1023(
    reporter: Reporter, child: subprocess.Popen[bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1100:
        pytest.skip("this host allows no more than 1100 open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1100), hard))
    ended = _Ended()
    watchdog = Watchdog(_with(reporter, child), 0.0, ended)
    low, watchdog._wake_read = watchdog._wake_read, fcntl.fcntl(watchdog._wake_read, fcntl.F_DUPFD, 1050)
    try:
        with watchdog:
            _kill(child)
            ended.wait()
    finally:
        os.close(low)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert ended.codes[0] == EXIT_FAILED
    assert "watches no more" not in capfd.readouterr().err


def test_without_a_folder_a_dead_neighbour_is_seen_by_the_first_that_is_left_but_not_in_the_end(
    reporter: Reporter, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    _with(reporter, child).mailbox = dataclasses.replace(reporter.mailbox, folder=None)
    watchdog = Watchdog(reporter, 0.0, _Ended())

    def missing(**states: str) -> bool:
        watchdog._suspects.clear()
        monkeypatch.setattr(
            type(reporter.mailbox), "states", lambda mailbox: {int(r[1:]): s for r, s in states.items()}
        )
        return [watchdog._is_rank_dead() for _ in range(2)][1]

    assert missing(_1=GONE, _2=RUNNING)
    reporter.mailbox = dataclasses.replace(
        reporter.mailbox, process=msgspec.structs.replace(reporter.mailbox.process, rank=2)
    )
    assert missing(_0=GONE, _1=GONE)
    assert not missing(_0=RUNNING, _1=GONE), "rank 0 says it"
    reporter.job.is_ending = lambda: True
    assert not missing(_0=GONE, _1=GONE)


def test_others_are_asked_no_oftener_than_they_say_something(reporter: Reporter) -> None:
    watchdog, asked = Watchdog(reporter, 40.0, _Ended()), list[int]()
    reporter.statements.spans.idle_s = lambda: 1000.0  # type: ignore[method-assign]
    watchdog._patience.idle_s = lambda idle_s, now_s: idle_s  # type: ignore[method-assign]
    moving = {1: _beat(1, 0.0)}
    watchdog._other_heartbeats = lambda: asked.append(1) or moving  # type: ignore[method-assign,func-returns-value]
    for _ in range(5):
        watchdog._poll()
    assert len(asked) == 1


def test_first_steps_and_evaluations_have_three_times_the_limit(reporter: Reporter) -> None:
    watchdog, spans = Watchdog(reporter, 600.0), reporter.statements.spans
    times = []
    for step in (0, 51, 52, 53):  # it resumes after step 50
        spans.step = step
        times.append(watchdog._times())
    assert times == [3.0, 3.0, 3.0, 1.0]
    with spans("evaluation"), spans("forward"):
        assert watchdog._times() == 3.0
    patience = Patience(600.0, 0.0)
    assert [patience.is_over(t, {}, t, 3.0) for t in (1799.0, 1801.0)] == [False, True]


def test_no_progress_is_said_once_before_anything_ends(reporter: Reporter, capfd: pytest.CaptureFixture[str]) -> None:
    watchdog, spans = Watchdog(reporter, 600.0), reporter.statements.spans
    watchdog._first_step, spans.step = 1, 12
    with spans("forward"):
        for idle_s in (100.0, 299.0, 300.0, 400.0):
            watchdog._warn(idle_s)
    (line,) = capfd.readouterr().err.splitlines()
    assert all(part in line for part in ("rank 0", "300 s", "forward", "step 12", "600 s", "observe.stall_timeout_s"))
    watchdog._warn(0.0)  # it continues
    watchdog._warn(301.0)
    assert "301 s" in capfd.readouterr().err
    process = msgspec.structs.replace(reporter.statements.process, rank=3)
    reporter.statements = dataclasses.replace(reporter.statements, process=process)
    with spans("wait"):
        watchdog._warn(0.0)
        watchdog._warn(500.0)
    assert capfd.readouterr().err == "", "it waits for another rank"
