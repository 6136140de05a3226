"""Facts about GPUs and their driver, read from the system without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.doctor.facts.child import ask
from hvdtrain.files import read_text_or_empty
from hvdtrain.runtime.binding import cores_near

_DRIVER = """
import ctypes, json
version = ctypes.c_int()
ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
print(json.dumps({"cuda": version.value}))
"""


@dataclass(frozen=True)
class GpuFacts:
    """NVIDIA GPUs."""

    count: int = 0  # of GPUs on the PCI bus, or with a device file
    driver: str | None = None  # version of the kernel driver; None if it is not loaded
    driver_cuda: tuple[int, int] | None = None  # newest CUDA it supports, such as (12, 4); None without its library
    peer_memory: bool = False  # whether the kernel module that lets network cards access GPU memory is loaded
    gdrcopy: bool = False  # whether the kernel module of GDRCopy is loaded
    near: Mapping[str, frozenset[int]] = field(default_factory=dict)  # cores near each GPU, by its PCI address


def gpu_facts(root: Path = Path("/")) -> GpuFacts:
    """Gather the facts. ``root``: root folder of ``sys``, ``proc`` and ``dev``."""
    devices = sum(path.name[6:].isdigit() for path in (root / "dev").glob("nvidia*"))
    driver = driver_version(root)
    on_bus = [device for device in sorted((root / "sys/bus/pci/devices").glob("*")) if _is_gpu(device)]
    number = int(ask(_DRIVER, timeout_s=20).values.get("cuda", 0)) if devices or driver else 0
    modules = root / "sys/module"
    return GpuFacts(
        count=max(devices, len(on_bus)),
        driver=driver,
        driver_cuda=(number // 1000, number % 1000 // 10) if number else None,
        peer_memory=any((modules / name).exists() for name in ("nvidia_peermem", "nv_peer_mem")),
        gdrcopy=(modules / "gdrdrv").exists(),
        near={device.name: cores_near(device.name, root / "sys") for device in on_bus},
    )


def driver_version(root: Path = Path("/")) -> str | None:
    """Return the version of NVIDIA's kernel driver; None if it is not loaded."""
    text = read_text_or_empty(root / "proc/driver/nvidia/version")
    version = re.search(r"Kernel Module.*?\s(\d+\.\d[\d.]*)", text)
    return version[1] if version else None


def gpu_models(root: Path = Path("/")) -> tuple[str, ...]:
    """Return the model of each GPU, as the driver lists them."""
    files = sorted(root.glob("proc/driver/nvidia/gpus/*/information"))
    models = (re.search(r"^Model:[ \t]*(\S.*?)\s*$", read_text_or_empty(file), re.M) for file in files)
    return tuple(model[1] if model else "a GPU" for model in models)


def _is_gpu(device: Path) -> bool:
    """Tell whether a PCI device is a display or 3D controller of NVIDIA."""
    vendor, kind = (read_text_or_empty(device / name) for name in ("vendor", "class"))
    return vendor.strip() == "0x10de" and kind.startswith("0x03")
