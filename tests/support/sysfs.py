"""Made-up ``sys`` folders of machines: their NUMA domains and GPUs, with addresses and cores as tools print them.

Sources: https://github.com/vllm-project/vllm/issues/13855 has the cores of a DGX H100 (``nvidia-smi topo -m``),
https://github.com/bytedance/xpu-perf/issues/129 those of a GH200 (``lscpu``), and
https://github.com/NVIDIA/mlperf-common/pull/16 the NUMA domains of four. Addresses are those that nvidia-smi shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

SOCKETS = ("0-55,112-167", "56-111,168-223")
DGX_GPUS = tuple(f"0000:{bus}:00.0" for bus in ("1b", "43", "52", "61", "9d", "c3", "d1", "df"))
GRACE = ("0-71", "72-143", "144-215", "216-287")
GRACE_GPUS = tuple(f"00{place}9:01:00.0" for place in range(4))
QUARTERS = ("0-31,128-159", "32-63,160-191", "64-95,192-223", "96-127,224-255")


def make(root: Path, domains: Sequence[str], gpus: Mapping[str, str] | None = None) -> Path:
    """Write the cores of each NUMA domain, and those near each GPU by its PCI address; return the root."""
    texts = {f"devices/system/node/node{n}/cpulist": cpus for n, cpus in enumerate(domains)}
    texts["devices/system/node/possible"] = f"0-{len(domains) - 1}"
    for address, cpus in (gpus or {}).items():
        device = f"bus/pci/devices/{address}"
        texts |= {f"{device}/local_cpulist": cpus, f"{device}/vendor": "0x10de", f"{device}/class": "0x030200"}
    for name, text in texts.items():
        (root / "sys" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "sys" / name).write_text(f"{text}\n")
    return root


def dgx_h100(root: Path) -> Path:
    """Two sockets, each with four GPUs; the first address of the bus is a bridge of the first socket."""
    bridge = "0000:00:00.0"
    make(root, SOCKETS, {bridge: SOCKETS[0], **{gpu: SOCKETS[n // 4] for n, gpu in enumerate(DGX_GPUS)}})
    for name, text in {"vendor": "0x8086", "class": "0x060000"}.items():
        (root / "sys/bus/pci/devices" / bridge / name).write_text(f"{text}\n")
    return root


def two_sockets(root: Path) -> Path:
    """Two sockets without GPUs, each with two NUMA domains (sub-NUMA clustering)."""
    return make(root, QUARTERS)


def gh200(root: Path, superchips: int = 1) -> Path:
    """Superchips of 72 cores and a GPU. The memory of each GPU is eight more NUMA domains, without cores."""
    gpus = dict(zip(GRACE_GPUS[:superchips], GRACE, strict=False))
    return make(root, [*GRACE[:superchips], *[""] * 8 * superchips], gpus)
