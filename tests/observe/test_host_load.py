from __future__ import annotations

import math
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvdtrain.observe import host_load as module
from hvdtrain.observe.host_load import CAUSES, HostLoad, steal_s, throttle_text
from hvdtrain.spans import Spans


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
    here = HostLoad(dict)
    assert here.read()[0] >= 0, "here it is known"
    here.close()


def test_what_is_no_part_of_a_step_is_not_counted(tmp_path: Path) -> None:
    _system(tmp_path, wait_ns=5_000_000)
    causes, spans = HostLoad(dict, tmp_path), Spans()
    spans.listeners_to["evaluation"] = [causes]
    outer, inner = spans("evaluation"), spans("forward")
    _system(tmp_path, wait_ns=5_100_000)
    with outer, inner:
        _system(tmp_path, wait_ns=9_000_000)
    _system(tmp_path, wait_ns=9_020_000)
    assert causes.read()[0] == 120
    causes.close()


def test_the_gpus_last_figures_are_given_without_asking_it(tmp_path: Path) -> None:
    _system(tmp_path)
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
    assert threads == [causes._thread]


def test_what_the_machine_does_not_tell_is_unknown(tmp_path: Path) -> None:
    causes = HostLoad(dict, tmp_path)
    assert all(map(math.isnan, causes.read()[:-1]))
    causes.close()
    assert math.isnan(steal_s(tmp_path / "proc/stat"))
    assert throttle_text(math.nan) is None and throttle_text(0.0) == ""
    _system(tmp_path, steal=250)
    assert steal_s(tmp_path / "proc/stat") == pytest.approx(2.5), "of the whole host"


@pytest.mark.parametrize(
    ("late_s", "computed_s", "waited_s", "stopped_s"),
    [
        (1.0, 0.0, 0.0, 1.0),
        (1.0, 0.1, 0.05, 0.85),
        (0.04, 0.0, 0.0, 0.0),  # a thread is never woken at once
        (1.0, 0.9, 0.0, 0.0),
        (1.0, 0.0, 0.9, 0.0),
        (1.0, 0.3, 0.0, 0.0),
        (0.1, 0.04, 0.0, 0.1),  # as much as in each tick
        (0.1, 0.04, 0.02, 0.08),
        (0.1, 0.24, 0.0, 0.0),
        (0.1, 0.0, 0.06, 0.0),
    ],
)
def test_a_stopped_process_is_known_and_a_busy_one_is_not_stopped(
    late_s: float, computed_s: float, waited_s: float, stopped_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Late by so much, in which the process computed and the thread waited for a core. Two threads compute before."""
    causes = HostLoad(dict, tmp_path)
    causes.close()
    now = SimpleNamespace(s=5.0, computed_s=7.0, waited_us=3e5)
    causes._busy = 2.0 if late_s < 1.0 else 0.0

    def wait(tick_s: float) -> bool:
        now.s += tick_s + late_s
        now.computed_s += computed_s
        now.waited_us += 1e6 * waited_s
        return False

    clocks = SimpleNamespace(monotonic=lambda: now.s, process_time=lambda: now.computed_s)
    monkeypatch.setattr(module, "time", clocks)
    monkeypatch.setattr(module, "_delay_us", lambda path: now.waited_us)
    monkeypatch.setattr(causes._ended, "wait", wait)
    for _ in range(2):
        assert not causes._tick()
        assert causes.read()[-1] == pytest.approx(1e6 * stopped_s)
    assert causes.read()[-1] == 0
