"""The machine's figures: those of this rank's device, none where there are none, and never an error."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hvdtrain.observe.monitor import GpuIdentity, Monitor, MonitorThread, gpu_identity, pci_address
from tests.support.launch import TIMEOUT_S

GPU = GpuIdentity(3, "1234-abcd", "0000:1B:00.0")


class Refused(Exception):
    pass


class Nvml:
    """A driver with two devices, of which the second is asked for; it can lack functions and ways to find a device."""

    NVMLError = Refused
    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, *lacks: str) -> None:
        self.lacks, self.millijoules = lacks, 1_000_000
        self.devices = {"GPU-0000-ffff": 7, "GPU-1234-abcd": 64, "0000:1B:00.0": 64}

    def _check(self, name: str) -> None:
        if name in self.lacks:
            raise Refused(name)

    def nvmlInit(self) -> None:
        self._check("init")

    def _find(self, name: str) -> int:
        if name not in self.devices:
            raise Refused(name)
        return self.devices[name]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        self._check("uuid")
        return self._find(uuid)

    def nvmlDeviceGetHandleByPciBusId(self, bus: str) -> int:
        self._check("pci")
        return self._find(bus)

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        self._check("pci info")
        return SimpleNamespace(domain=9, bus=1, device=0)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        self._check("utilization")
        return SimpleNamespace(gpu=handle, memory=0)

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        return {self.NVML_CLOCK_SM: 1000 + handle}[kind]

    def nvmlDeviceGetTemperature(self, handle: int, kind: int) -> int:
        return {self.NVML_TEMPERATURE_GPU: handle - 10}[kind]

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 250_500

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        self._check("energy")
        assert handle == 64
        return self.millijoules

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=3 << 30, total=80 << 30)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return 0x1 | 0x4 | 0x40


def _sample(monkeypatch: pytest.MonkeyPatch, nvml: Any, gpu: GpuIdentity | None = GPU) -> dict[str, Any]:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found = Monitor(gpu).sample()
    return {name: value for name, value in found.items() if name.startswith("gpu_")}


@pytest.mark.parametrize(
    ("reported", "nvml", "address"),
    [
        ("0001:1B:00.0", None, "0001:1B:00.0"),
        ("0000:00:00.0", Nvml(), "0009:01:00.0"),
        ("0000:00:00.0", Nvml("pci info"), ""),
        ("0000:00:00.0", None, ""),
    ],
)
def test_the_address_is_nvmls_where_torch_has_none(
    monkeypatch: pytest.MonkeyPatch, reported: str, nvml: Any, address: str
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert pci_address(GpuIdentity(0, "1234-abcd", reported)) == address


def test_the_host_and_this_process() -> None:
    monitor = Monitor()
    first, second = monitor.sample(), monitor.sample()
    assert first.keys() | {"host_cpu_percent"} == second.keys() != first.keys(), "a share of time needs two looks"
    assert 0 < second["process_rss_bytes"] < second["host_memory_total_bytes"]
    assert 0 < second["host_memory_used_bytes"] < second["host_memory_total_bytes"]
    assert 0 <= second["host_cpu_percent"] <= 100


@pytest.mark.parametrize(
    ("lacks", "percent"),
    [((), {"gpu_percent": 64}), (("uuid",), {"gpu_percent": 64}), (("utilization",), {})],
    ids=["by UUID", "by PCI bus", "what it does not tell is absent"],
)
def test_the_device_of_this_rank_whatever_its_index(
    monkeypatch: pytest.MonkeyPatch, lacks: tuple[str, ...], percent: dict[str, int]
) -> None:
    assert _sample(monkeypatch, Nvml(*lacks)) == {
        **percent,
        "gpu_clock_mhz": 1064,
        "gpu_temperature_c": 54,
        "gpu_power_w": 250.5,
        "gpu_memory_used_bytes": 3 << 30,
        "gpu_memory_total_bytes": 80 << 30,
        "gpu_throttle": ["power cap", "thermal, hardware"],
    }


@pytest.mark.parametrize(
    ("nvml", "gpu"),
    [(None, GPU), (Nvml("init"), GPU), (Nvml("uuid", "pci"), GPU), (object(), None)],
    ids=["library", "driver", "device", "GPU: NVML is not asked"],
)
def test_without(monkeypatch: pytest.MonkeyPatch, nvml: Any, gpu: GpuIdentity | None) -> None:
    assert _sample(monkeypatch, nvml, gpu) == {}


def test_torchs_device_by_uuid_and_bus_and_its_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(uuid="1234-abcd", pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    assert gpu_identity(torch.device("cuda", 3)) == GPU
    assert gpu_identity(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda index: 5 + index)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda index: 7 + index)
    sampled = Monitor(GPU).sample()
    assert (sampled["cuda_allocated_peak_bytes"], sampled["cuda_reserved_peak_bytes"]) == (8, 10)


def test_the_thread_tells_until_it_is_closed() -> None:
    told: list[dict[str, Any]] = []
    enough = threading.Event()

    def tell(record: dict[str, Any]) -> None:
        told.append(record)
        if len(told) >= 3 and record["at_step"] == 4:
            enough.set()

    watch = MonitorThread(lambda: {"host_cpu_percent": 1.0}, tell, every_s=0.001)
    watch.begin_step(4)
    assert enough.wait(TIMEOUT_S)
    watch.close()
    assert not watch._thread.is_alive()
    assert told[-1] == {"event": "machine", "at_step": 4, "host_cpu_percent": 1.0}


def test_what_a_sample_raises_ends_the_watching_alone(caplog: pytest.LogCaptureFixture) -> None:
    def sample() -> dict[str, Any]:
        raise OSError("no /proc")

    watch = MonitorThread(sample, lambda record: None, every_s=0.001)
    watch._thread.join(TIMEOUT_S)
    watch.close()
    assert "no /proc" in caplog.text
