"""What the system says of GPUs and their driver, whatever torch can do with them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.doctor.facts.child import ask

_DRIVER = """
import ctypes, json
version = ctypes.c_int()
ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
print(json.dumps({"cuda": version.value}))
"""


@dataclass(frozen=True)
class GpuFacts:
    """NVIDIA's GPUs.

    Attributes:
        on_bus: GPUs that the PCI bus shows.
        devices: those of them for which there is a device file.
        driver: version of the kernel's driver; None where it is not loaded.
        driver_cuda: newest CUDA that the driver's library can serve, such as (12, 4); None where that is not found.
        peer_memory: whether the kernel's module by which network cards reach GPU memory is loaded.
        gdrcopy: whether that of GDRCopy is.
    """

    on_bus: int = 0
    devices: int = 0
    driver: str | None = None
    driver_cuda: tuple[int, int] | None = None
    peer_memory: bool = False
    gdrcopy: bool = False


def gpu_facts(root: Path = Path("/")) -> GpuFacts:
    """Look for GPUs and their driver. ``root``: the file system whose ``sys``, ``proc`` and ``dev`` are asked."""
    devices = sum(path.name[6:].isdigit() for path in (root / "dev").glob("nvidia*"))
    version = re.search(r"Kernel Module.*?\s(\d+\.\d[\d.]*)", _text(root / "proc/driver/nvidia/version"))
    number = int(ask(_DRIVER, timeout_s=20).values.get("cuda", 0)) if devices or version else 0
    modules = root / "sys/module"
    return GpuFacts(
        on_bus=sum(_is_gpu(device) for device in (root / "sys/bus/pci/devices").glob("*")),
        devices=devices,
        driver=version[1] if version else None,
        driver_cuda=(number // 1000, number % 1000 // 10) if number else None,
        peer_memory=any((modules / name).exists() for name in ("nvidia_peermem", "nv_peer_mem")),
        gdrcopy=(modules / "gdrdrv").exists(),
    )


def _is_gpu(device: Path) -> bool:
    """A display or 3D controller of NVIDIA's."""
    return _text(device / "vendor").strip() == "0x10de" and _text(device / "class").startswith("0x03")


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
