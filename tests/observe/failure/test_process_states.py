from __future__ import annotations

import errno
import os
import signal
import subprocess
from pathlib import Path

import pytest

from hvdtrain.observe.failure import process_states as states

LETTERS = {**dict.fromkeys("RSD", states.RUNNING), **dict.fromkeys("Tt", states.STOPPED), "Z": states.ZOMBIE}


@pytest.mark.parametrize(("letter", "expected"), [*LETTERS.items(), ("X", states.GONE)])
def test_states(letter: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "5").mkdir()
    (tmp_path / "5/stat").write_text(f"5 (a (b) c) {letter} {'0 ' * 18}99 0 0\n")
    assert states.started(5, tmp_path) == 99
    assert states.state(5, 99, tmp_path) == expected
    assert states.state(5, 98, tmp_path) == states.GONE, "the number is another process's by now"
    assert states.state(6, 99, tmp_path) == states.GONE
    assert states.started(6, tmp_path) is None


def test_a_real_child() -> None:
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    began = states.started(child.pid)
    assert began is not None
    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert states.state(child.pid, began) == states.STOPPED
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert states.state(child.pid, began) == states.ZOMBIE
    child.communicate()
    assert states.state(child.pid, began) == states.GONE


def test_memory_in_mib(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/status").write_text("Name:\tpython\nVmHWM:\t 4096 kB\nVmRSS:\t 2048 kB\nThreads:\t3\n")
    (tmp_path / "meminfo").write_text("MemTotal:  1048576 kB\nMemAvailable: 524288 kB\nHugePages_Total: 0\n")
    assert states.memory(tmp_path) == {"rss": 2.0, "peak_rss": 4.0, "host_total": 1024.0, "host_available": 512.0}
    assert states.memory(tmp_path / "nothing") == {}
    (tmp_path / "vmstat").write_text("nr_free_pages 5\noom_kill 3\n")
    assert (states.oom_kills(tmp_path), states.oom_kills(tmp_path / "nothing")) == (3, 0)
    own = states.memory()
    assert 0 < own["rss"] <= own["peak_rss"] < own["host_total"]


@pytest.mark.parametrize("name", ["EMFILE", "ENFILE", "EACCES", "ENOENT", "ESRCH"])
def test_an_unreadable_process_does_not_count_as_dead(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: Path, **how: object) -> str:
        raise OSError(getattr(errno, name), name)

    monkeypatch.setattr(Path, "read_text", fails)
    assert states.state(5, 99, tmp_path) == (states.GONE if name in ("ENOENT", "ESRCH") else states.UNKNOWN)
