from __future__ import annotations

import math
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hvdtrain.observe.host_load import CAUSES, HostLoad, steal_s, throttle_text


def _system(root: Path, wait_ns: int = 0, steal: int = 0) -> None:
    task = root / f"proc/self/task/{threading.get_native_id()}"
    task.mkdir(parents=True, exist_ok=True)
    (task / "schedstat").write_text(f"123 {wait_ns} 7\n")
    (root / "proc/stat").write_text(f"cpu  1 2 3 4 5 6 7 {steal} 0 0\ncpu0 1 2 3 4 5 6 7 8 0 0\n")


def test_a_lap_is_what_has_come_since_the_last(tmp_path: Path) -> None:
    _system(tmp_path, wait_ns=5_000_000)
    causes = HostLoad(dict, tmp_path)
    _system(tmp_path, wait_ns=5_750_000)
    assert dict(zip(CAUSES, causes.read(), strict=True))["cpu_wait_us"] == 750
    assert causes.read()[0] == 0
    causes.close()
    causes.close()


def test_the_gpus_last_figures_are_given_without_asking_it(tmp_path: Path) -> None:
    _system(tmp_path)
    asked = threading.Event()
    threads = []

    def gpu() -> dict[str, object]:
        threads.append(threading.current_thread())
        return {"gpu_clock_mhz": 1980, "gpu_temperature_c": 61, "gpu_throttle": ["power cap", "thermal, hardware"]}

    causes = HostLoad(gpu, tmp_path)
    causes._ended.set()  # one look is enough
    causes._thread.join()
    lap = dict(zip(CAUSES, causes.read(), strict=True))
    assert (lap["gpu_clock_mhz"], lap["gpu_temperature_c"]) == (1980, 61)
    assert throttle_text(lap["gpu_throttle"]) == "power cap, thermal, hardware"
    assert threads == [causes._thread] and not asked.is_set()
    causes.close()


def test_what_the_machine_does_not_tell_is_unknown(tmp_path: Path) -> None:
    causes = HostLoad(dict, tmp_path)
    assert all(map(math.isnan, causes.read()[:-1]))
    causes.close()
    assert math.isnan(steal_s(tmp_path / "proc/stat"))
    assert throttle_text(math.nan) is None and throttle_text(0.0) == ""


def test_steal_is_that_of_the_whole_host(tmp_path: Path) -> None:
    _system(tmp_path, steal=250)
    assert steal_s(tmp_path / "proc/stat") == pytest.approx(2.5)


def test_here_waiting_for_a_core_is_known() -> None:
    causes = HostLoad(dict)
    assert causes.read()[0] >= 0
    causes.close()


_LOOP = """
import sys, threading, time
from hvdtrain.observe.host_load import HostLoad
causes = HostLoad(dict)
print("begun", flush=True)
while sys.stdin.readline():
    time.sleep(0.3)  # idle: the thread is late only if the process was stopped
    until = time.monotonic() + 0.3
    while time.monotonic() < until:  # it computes, so that the thread may be late
        sum(range(10_000_000))
    print(causes.read()[-1], flush=True)
"""


@pytest.mark.flaky(reruns=2)
def test_here_a_stopped_process_is_known_and_a_busy_one_is_not_stopped() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _LOOP], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None

        def lap() -> float:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            return float(process.stdout.readline())

        assert process.stdout.readline() == "begun\n"
        assert lap() == 0
        process.send_signal(signal.SIGSTOP)
        began_s = time.monotonic()
        time.sleep(1.0)
        process.send_signal(signal.SIGCONT)
        stopped_us = 1e6 * (time.monotonic() - began_s)
        assert lap() == pytest.approx(stopped_us, rel=0.2)
        assert lap() == 0
        process.stdin.close()
