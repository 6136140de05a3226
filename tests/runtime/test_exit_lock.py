from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hvdtrain.runtime.channel import LIFELINE, Lifeline, hold_lifeline, make_lifeline
from tests.support.launch import TIMEOUT_S

HOLDER = """
import os, sys
from hvdtrain.runtime.channel import hold_lifeline
print(hold_lifeline(os.environ), flush=True)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""


@contextmanager
def _holder() -> Iterator[tuple[subprocess.Popen[str], Lifeline]]:
    made = make_lifeline()
    assert made is not None
    lifeline, descriptor = made
    command, pipe, environ = [sys.executable, "-c", HOLDER], subprocess.PIPE, {**os.environ, LIFELINE: str(descriptor)}
    with subprocess.Popen(command, env=environ, pass_fds=(descriptor,), stdin=pipe, stdout=pipe, text=True) as process:
        os.close(descriptor)
        assert process.stdout is not None and process.stdout.readline() == "True\n"
        yield process, lifeline
        process.kill()


def _watch(lifeline: Lifeline) -> tuple[threading.Event, threading.Thread]:
    told = threading.Event()
    watcher = threading.Thread(target=lambda: lifeline.wait() and told.set(), daemon=True)
    watcher.start()
    return told, watcher


def _tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


@pytest.mark.parametrize("end", ["exit(3)", "os.abort()", "os.execv('/bin/sleep', ['sleep', '9999'])"])
def test_the_end_of_a_process_is_reported_whatever_its_cause(end: str) -> None:
    with _holder() as (process, lifeline):
        told, watcher = _watch(lifeline)
        _tell(process, end)
        watcher.join(TIMEOUT_S)
        assert told.is_set()


@pytest.mark.parametrize(
    "act",
    [
        "(pid := os.fork()) or os._exit(0); os.waitpid(pid, 0)",
        "import subprocess; subprocess.run(['/bin/true'])",
        "import threading; t = threading.Thread(target=int); t.start(); t.join()",
    ],
)
def test_the_end_of_its_children_and_threads_is_not_its_own(act: str) -> None:
    with _holder() as (process, lifeline):
        told, watcher = _watch(lifeline)
        _tell(process, act)
        assert process.stdout is not None and process.stdout.readline() == "done\n"
        holder = int.from_bytes(lifeline._memory[:4], sys.byteorder) & 0x3FFFFFFF  # of the lock, as glibc keeps it
        assert holder == process.pid and not told.is_set()
        process.kill()
        watcher.join(TIMEOUT_S)
        assert told.is_set()


def test_a_lock_without_holder_reports_no_end_and_only_the_thread_that_ends_with_the_process_holds_one() -> None:
    made = make_lifeline()
    assert made is not None
    lifeline, descriptor = made
    held: list[bool] = []
    other = threading.Thread(target=lambda: held.append(hold_lifeline({LIFELINE: str(descriptor)})))
    other.start()
    other.join()
    os.close(descriptor)
    assert held == [False]
    assert not lifeline.wait()


@pytest.mark.parametrize("value", [None, "", "x", "987654", "file"])
def test_only_the_given_process_holds_the_lock(value: str | None, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(4096))
    with (tmp_path / "file").open("r+b") as file:
        given = str(file.fileno()) if value == "file" else value
        assert not hold_lifeline({} if given is None else {LIFELINE: given})
    assert (tmp_path / "file").read_bytes() == bytes(4096)
