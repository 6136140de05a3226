"""Sample processor, memory, and the device of this rank."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import psutil

log = logging.getLogger(__name__)

EVERY_S = 10.0
_FIRST_AFTER_S = 2.0

_NO_ADDRESS = "0000:00:00.0"
"""Of a torch that does not report it; it is that of a bridge, never of a GPU."""

THROTTLES = {0x04: "power cap", 0x08: "hardware slowdown", 0x10: "sync boost", 0x20: "thermal, software",
             0x40: "thermal, hardware", 0x80: "power brake"}  # fmt: skip
"""Bits of NVML's clocks event reasons that mean a lowered clock, without idling and clocks that users set."""

_FAULTS = ("hardware slowdown", "thermal, software", "thermal, hardware", "power brake")


@dataclass(frozen=True)
class GpuIdentity:
    """Names of a CUDA device in NVML. With CUDA_VISIBLE_DEVICES, NVML's index differs from torch's."""

    index: int  # torch's
    uuid: str  # without the prefix ``GPU-``
    pci_bus_id: str  # such as ``0000:1B:00.0``


def gpu_identity(device: Any) -> GpuIdentity | None:
    """Return the names of a torch device; None if it is not a CUDA device."""
    if device.type != "cuda":
        return None
    import torch

    found = torch.cuda.get_device_properties(device)
    place = [int(getattr(found, name, 0)) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    return GpuIdentity(device.index or 0, str(getattr(found, "uuid", "")), _address(*place))


def _address(domain: int, bus: int, device: int) -> str:
    return f"{domain:04X}:{bus:02X}:{device:02X}.0"


def pci_address(gpu: GpuIdentity) -> str:
    """Return the PCI address of a GPU; from NVML if torch does not know it, empty if neither does."""
    if gpu.pci_bus_id != _NO_ADDRESS:
        return gpu.pci_bus_id
    nvml, handle = open_nvml(gpu)
    if handle is not None:
        with suppress(nvml.NVMLError):
            found = nvml.nvmlDeviceGetPciInfo(handle)
            return _address(found.domain, found.bus, found.device)
    return ""


@dataclass
class Monitor:
    """Samples this machine. Unavailable figures are absent: without a GPU, a driver or a library."""

    gpu: GpuIdentity | None = None
    _sampled: bool = False

    def sample(self) -> dict[str, Any]:
        """Return current figures of the host (its processor from the second sample on), the device and its allocator.

        Any thread may call it, but only one at a time.
        """
        memory = psutil.virtual_memory()
        figures = {
            "host_memory_used_bytes": memory.total - memory.available,
            "host_memory_total_bytes": memory.total,
            "process_rss_bytes": psutil.Process().memory_info().rss,
        }
        cpu_percent = psutil.cpu_percent(None)  # since the last call, so the first result means nothing
        if self._sampled:
            figures["host_cpu_percent"] = cpu_percent
        self._sampled = True
        return {**figures, **self.device(), **self._allocator()}

    def device(self) -> dict[str, Any]:
        """Return the figures of the device only."""
        nvml, handle = self._nvml
        if handle is None:
            return {}
        found = {}
        reads: Mapping[str, Callable[[], Any]] = {
            "gpu_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "gpu_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "gpu_temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "gpu_power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "gpu_memory_used_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
            "gpu_memory_total_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total,
            "gpu_throttle": lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
        }
        for name, read in reads.items():
            with suppress(nvml.NVMLError):  # some devices lack some figures, such as a MIG part
                found[name] = read()
        if (bits := found.get("gpu_throttle")) is not None:
            found["gpu_throttle"] = [reason for bit, reason in THROTTLES.items() if bits & bit]
        return found

    @cached_property
    def _nvml(self) -> tuple[Any, Any]:
        return open_nvml(self.gpu) if self.gpu is not None else (None, None)

    def _allocator(self) -> dict[str, Any]:
        torch = sys.modules.get("torch")
        if self.gpu is None or torch is None or not torch.cuda.is_initialized():
            return {}
        index = self.gpu.index  # each thread has its own current device
        return {
            "cuda_allocated_peak_bytes": torch.cuda.max_memory_allocated(index),
            "cuda_reserved_peak_bytes": torch.cuda.max_memory_reserved(index),
        }


def open_nvml(gpu: GpuIdentity) -> tuple[Any, Any]:
    """Return NVML and its handle of a GPU; None twice if there is no library, driver or such GPU."""
    try:
        import pynvml as nvml
    except ImportError:
        log.debug("no figures of the GPU: nvidia-ml-py is not installed")
        return None, None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        log.debug("no figures of the GPU: %s", error)
        return None, None
    ways: tuple[tuple[Callable[[str], Any], str], ...] = (
        (nvml.nvmlDeviceGetHandleByUUID, f"GPU-{gpu.uuid}"),
        (nvml.nvmlDeviceGetHandleByUUID, f"MIG-{gpu.uuid}"),
        (nvml.nvmlDeviceGetHandleByPciBusId, gpu.pci_bus_id),
    )
    for look_up, name in ways:
        with suppress(nvml.NVMLError):
            return nvml, look_up(name)
    log.debug("no figures of the GPU: NVML has neither %s nor %s", gpu.uuid, gpu.pci_bus_id)
    return None, None


def gpu_remarks(gpu: GpuIdentity) -> list[str]:
    """Return faults of a GPU that NVML reports now: memory errors, and a clock lowered by heat or by its supply."""
    nvml, handle = open_nvml(gpu)
    found = [f"clock lowered: {why}" for why in Monitor(gpu).device().get("gpu_throttle", []) if why in _FAULTS]
    if handle is not None:
        with suppress(nvml.NVMLError):  # without ECC
            kind, since_boot = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            if errors := nvml.nvmlDeviceGetTotalEccErrors(handle, kind, since_boot):
                found.append(f"{errors} uncorrected memory errors (ECC) since the driver was loaded")
    return [f"GPU {gpu.pci_bus_id}: {text}" for text in found]


@dataclass
class MonitorThread:
    """Samples every `every_s` seconds, first sooner, in a thread of its own, until closed.

    In that thread, `on_event` receives an event ``machine`` with the sampled figures.
    """

    sample: Callable[[], Mapping[str, Any]]
    on_event: Callable[[dict[str, Any]], None]
    every_s: float = EVERY_S
    _step: int = 0
    _ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, name="machine monitor", daemon=True)
        self._thread.start()

    def begin_step(self, step: int) -> None:
        """Note that step `step` begins."""
        self._step = step

    def close(self) -> None:
        """Stop sampling. Does not wait for a thread that hangs in a driver."""
        self._ended.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        try:
            self.sample()  # counts since the last sample begin here
            after_s = min(_FIRST_AFTER_S, self.every_s)
            while not self._ended.wait(after_s):
                self.on_event({"event": "machine", "at_step": self._step, **self.sample()})
                after_s = self.every_s
        except Exception as error:
            log.warning("no more metrics of the machine: %s: %s", type(error).__name__, error)
