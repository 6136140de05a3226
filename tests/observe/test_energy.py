from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.observe import energy
from hvdtrain.observe.energy import CounterError, CpuCounter, EnergyMeter, GpuCounter, open_counter
from hvdtrain.observe.monitor import GpuIdentity
from tests.observe.test_monitor import GPU, nvml

RANGE_UJ = 1_000_000


def set_zones(root: Path, **microjoules: int) -> None:
    """Write zones as Linux does: ``package_0``, ``package_0_core``, ``package_0_dram``, ``psys_1``, ``mmio_0``."""
    names = {"package_0": "intel-rapl:0", "package_1": "intel-rapl:1", "package_0_core": "intel-rapl:0:0",
             "package_0_dram": "intel-rapl:0:1", "psys_1": "intel-rapl:2", "mmio_0": "intel-rapl-mmio:0"}  # fmt: skip
    for zone, value in microjoules.items():
        folder = root / "sys/class/powercap" / names[zone]
        folder.mkdir(parents=True, exist_ok=True)
        kind = zone.rpartition("_")[2] if zone.count("_") == 2 else zone.replace("_", "-")
        (folder / "name").write_text(f"{'package-0' if zone == 'mmio_0' else kind}\n")
        (folder / "energy_uj").write_text(f"{value}\n")
        (folder / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")


def test_packages_and_memory_are_summed_and_their_parts_are_not(tmp_path: Path) -> None:
    zones = dict.fromkeys(("package_0", "package_1", "package_0_core", "package_0_dram", "psys_1", "mmio_0"), 5000)
    set_zones(tmp_path, **zones)
    counter = CpuCounter(tmp_path)
    assert counter.read() == 0
    set_zones(tmp_path, package_0=15_000, package_1=6000, package_0_core=95_000, package_0_dram=8000, psys_1=99_000,
              mmio_0=15_000)  # fmt: skip
    assert counter.read() == 10 + 1 + 3


def test_a_counter_that_starts_again_at_0_loses_nothing(tmp_path: Path) -> None:
    set_zones(tmp_path, package_0=RANGE_UJ - 3000)
    counter = CpuCounter(tmp_path)
    for value, used_mj in ((2000, 5), (RANGE_UJ - 1000, 5 + 997), (1000, 5 + 997 + 2)):
        set_zones(tmp_path, package_0=value)
        assert counter.read() == used_mj


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("energy_uj", FileNotFoundError(2, "No such file"), "No such file"),
        ("energy_uj", PermissionError(13, "Permission denied"), "root only"),
        ("energy_uj", "much", "much"),
        ("name", "psys", "no RAPL counters"),
    ],
)
def test_what_cannot_be_read_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, content: str | OSError, reason: str
) -> None:
    set_zones(tmp_path, package_0=5000)
    spoiled, read = tmp_path / "sys/class/powercap/intel-rapl:0" / file, Path.read_text

    def read_text(path: Path, *given: Any, **named: Any) -> str:
        if path == spoiled and isinstance(content, OSError):
            raise content
        return content if path == spoiled else read(path, *given, **named)

    monkeypatch.setattr(Path, "read_text", read_text)
    counter, why = open_counter(lambda: CpuCounter(tmp_path))
    assert counter is None and reason in why
    assert open_counter(lambda: CpuCounter(tmp_path / "none"))[0] is None


@pytest.mark.parametrize(
    ("driver", "gpu", "reason"),
    [
        (None, GPU, "find"),
        (nvml(), GpuIdentity(0, "other", "1"), "find"),
        (nvml("nvmlDeviceGetTotalEnergyConsumption"), GPU, "not supported"),
    ],
)
def test_a_gpu_without_a_counter(monkeypatch: pytest.MonkeyPatch, driver: Any, gpu: GpuIdentity, reason: str) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    counter, why = open_counter(lambda: GpuCounter(gpu))
    assert counter is None and reason in why
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    known = GpuCounter(GPU)
    assert -known.read() + known.read() == 2500


class FakeCounter:
    """Counts up by `step_mj` with each reading, and fails from reading `fails_at` on."""

    def __init__(self, step_mj: int, fails_at: int = 1 << 30) -> None:
        self.step_mj, self.fails_at, self.readings = step_mj, fails_at, 0

    def read(self) -> int:
        self.readings += 1
        if self.readings >= self.fails_at:
            raise CounterError("the device is lost")
        return 10**9 + self.step_mj * self.readings


def test_a_meter_counts_from_its_start_and_reports_a_failure() -> None:
    meter = EnergyMeter({energy.GPUS: FakeCounter(5), energy.CPUS: FakeCounter(7, fails_at=3)}, every_s=1e6)
    assert meter.used_mj() == {"GPUs": 0, "CPUs": 0}
    meter.read()
    assert (meter.used_mj(), meter.failed) == ({"GPUs": 5, "CPUs": 7}, set())
    meter.read()
    assert (meter.used_mj(), meter.failed) == ({"GPUs": 10, "CPUs": 7}, {"CPUs"})
    meter.close()
    counter = FakeCounter(5)
    meter = EnergyMeter({energy.GPUS: counter}, every_s=0.001)
    while counter.readings < 5:
        pass  # it reads by itself
    meter.close()
    assert meter.used_mj()["GPUs"] >= 5 * 3
