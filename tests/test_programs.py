"""Programs that are run to their end: what they write, and what happens to those that do not end."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from hvdtrain.programs import Finished, read_stat, run_program, wait_with_signals
from tests.support.processes import is_alive


def test_code_and_output(tmp_path: Path) -> None:
    done = run_program(["sh", "-c", "pwd; printf '\\377' >&2; exit $(($(wc -c) + 3))"], 60, folder=tmp_path)
    assert done == Finished(3, f"{tmp_path}\n", "\N{REPLACEMENT CHARACTER}")
    assert run_program(["sh", "-c", "echo $A; kill -9 $$"], 60, {"A": "a", "PATH": os.defpath}) == (-9, "a\n", "")
    with pytest.raises(FileNotFoundError):
        run_program([str(tmp_path / "nothing")], 60)


@pytest.mark.parametrize("end_s", [0.0, 60.0])
def test_one_that_does_not_end_is_killed_with_what_it_started(
    end_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids, wait = tmp_path / "pids", subprocess.Popen.communicate

    def communicate(self: subprocess.Popen[str], timeout: float) -> tuple[str, str]:
        if timeout != 777:
            return wait(self, timeout=timeout)
        while not (pids.exists() and len(pids.read_text().split()) == 2):
            pass
        raise subprocess.TimeoutExpired(self.args, timeout)  # as soon as there is something to kill

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate)
    trap = "trap 'echo ended > ended; exit' TERM" if end_s else ":"
    script = f"{trap}; sleep 600 & echo $$ $! > pids; wait"
    with pytest.raises(TimeoutError, match="sh did not end within 777 s"):
        run_program(["sh", "-c", script], 777, folder=tmp_path, end_s=end_s)
    assert (tmp_path / "ended").exists() == bool(end_s)
    for pid in map(int, pids.read_text().split()):
        while is_alive(pid):
            time.sleep(0.01)


def test_facts_about_this_process() -> None:
    own = read_stat(os.getpid())
    assert own.state == "R" and own.session == os.getsid(0) and own.cpu_s > 0
    assert read_stat(os.getpid()).start_ticks == own.start_ticks >= read_stat(os.getppid()).start_ticks


def test_a_signal_is_handled_though_it_does_not_interrupt_the_wait() -> None:
    process = subprocess.Popen(["sleep", "600"])
    before = signal.signal(signal.SIGUSR2, lambda *_: process.terminate())

    def signal_this_thread() -> None:
        time.sleep(0.1)  # by now the other thread waits
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)

    try:
        threading.Thread(target=signal_this_thread).start()
        assert wait_with_signals(process) == 128 + signal.SIGTERM
    finally:
        process.kill()
        signal.signal(signal.SIGUSR2, before)
