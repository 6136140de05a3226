"""The machine's figures: those of this rank's device, none where there are none, and never an error."""

from __future__ import annotations

import itertools
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


def nvml(*lacks: str) -> Any:
    """Return a driver with two devices, of which the second is asked for; it can lack functions."""
    devices = {"GPU-0000-ffff": 7, "GPU-1234-abcd": 64, "0000:1B:00.0": 64}
    energy_mj = itertools.count(10**6, 2500)

    def find(name: str) -> int:
        if name not in devices:
            raise Refused(name)
        return devices[name]

    functions = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": find,
        "nvmlDeviceGetHandleByPciBusId": find,
        "nvmlDeviceGetPciInfo": lambda device: SimpleNamespace(domain=9, bus=1, device=0),
        "nvmlDeviceGetUtilizationRates": lambda device: SimpleNamespace(gpu=device, memory=0),
        "nvmlDeviceGetClockInfo": lambda device, kind: {"SM": 1000 + device}[kind],
        "nvmlDeviceGetTemperature": lambda device, kind: {"GPU": device - 10}[kind],
        "nvmlDeviceGetPowerUsage": lambda device: 250_500,
        "nvmlDeviceGetTotalEnergyConsumption": lambda device: {64: next(energy_mj)}[device],
        "nvmlDeviceGetMemoryInfo": lambda device: SimpleNamespace(used=3 << 30, total=80 << 30),
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda device: 0x1 | 0x4 | 0x40,
    }

    def refuse(*given: object) -> None:
        raise Refused("not supported")

    found = {name: refuse if name in lacks else function for name, function in functions.items()}
    return SimpleNamespace(NVMLError=Refused, NVML_CLOCK_SM="SM", NVML_TEMPERATURE_GPU="GPU", **found)


BY_UUID, BY_BUS = "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetHandleByPciBusId"


def _sample(monkeypatch: pytest.MonkeyPatch, driver: Any, gpu: GpuIdentity | None = GPU) -> dict[str, Any]:
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    found = Monitor(gpu).sample()
    return {name: value for name, value in found.items() if name.startswith("gpu_")}


@pytest.mark.parametrize(
    ("reported", "driver", "address"),
    [
        ("0001:1B:00.0", None, "0001:1B:00.0"),
        ("0000:00:00.0", nvml(), "0009:01:00.0"),
        ("0000:00:00.0", nvml("nvmlDeviceGetPciInfo"), ""),
        ("0000:00:00.0", None, ""),
    ],
)
def test_the_address_is_nvmls_where_torch_has_none(
    monkeypatch: pytest.MonkeyPatch, reported: str, driver: Any, address: str
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", driver)
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
    [("", {"gpu_percent": 64}), (BY_UUID, {"gpu_percent": 64}), ("nvmlDeviceGetUtilizationRates", {})],
    ids=["by UUID", "by PCI bus", "what it does not tell is absent"],
)
def test_the_device_of_this_rank_whatever_its_index(
    monkeypatch: pytest.MonkeyPatch, lacks: str, percent: dict[str, int]
) -> None:
    assert _sample(monkeypatch, nvml(lacks)) == {
        **percent,
        "gpu_clock_mhz": 1064,
        "gpu_temperature_c": 54,
        "gpu_power_w": 250.5,
        "gpu_memory_used_bytes": 3 << 30,
        "gpu_memory_total_bytes": 80 << 30,
        "gpu_throttle": ["power cap", "thermal, hardware"],
    }


@pytest.mark.parametrize(
    ("driver", "gpu"),
    [(None, GPU), (nvml("nvmlInit"), GPU), (nvml(BY_UUID, BY_BUS), GPU), (object(), None)],
    ids=["library", "driver", "device", "GPU: NVML is not asked"],
)
def test_without(monkeypatch: pytest.MonkeyPatch, driver: Any, gpu: GpuIdentity | None) -> None:
    assert _sample(monkeypatch, driver, gpu) == {}


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
