"""Energy used by a GPU and by the processors of a host, from their own counters."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from hvdtrain.observe.monitor import GpuIdentity, open_nvml

GPUS, CPUS = "GPUs", "CPUs"
KINDS = (GPUS, CPUS)
"""What has counters of energy."""

EVERY_S = 5.0
"""How often counters are read. A counter of RAPL starts again at 0 after a minute or more."""

_ZONE = re.compile(r"intel-rapl(:\d+){1,2}")


class CounterError(Exception):
    """A counter cannot be read; the text is the reason."""


class GpuCounter:
    """The counter of a GPU, by NVML: of the whole GPU, including other programs that use it.

    Errors: CounterError: there is no such counter, as on GPUs before Volta and on a part of a GPU (MIG).
    """

    def __init__(self, gpu: GpuIdentity) -> None:
        self._nvml, self._handle = open_nvml(gpu)
        if self._handle is None:
            raise CounterError("NVML does not find this GPU")
        self.read()

    def read(self) -> int:
        """Return the millijoules since the driver was loaded."""
        try:
            return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        except self._nvml.NVMLError as error:
            raise CounterError(f"NVML: {error}") from None


class CpuCounter:
    """The counters of a host's processors and of their memory (RAPL): of all programs on the host.

    Zones of parts of a processor are left out, because the processor's own counter includes them. That of memory
    (dram) is separate. AMD's processors have the same files.

    Errors: CounterError: there are no counters, or this user may not read them.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        folder = root / "sys/class/powercap"
        zones = [zone for zone in sorted(folder.glob("intel-rapl:*")) if _ZONE.fullmatch(zone.name)]
        self._zones: dict[Path, int] = {}
        self._last_uj: dict[Path, int] = {}
        self._total_uj = 0
        for zone in zones:
            name = _text(zone / "name")
            if name.startswith("package") or name == "dram":
                self._last_uj[zone] = int(_text(zone / "energy_uj"))
                self._zones[zone] = int(_text(zone / "max_energy_range_uj"))
        if not self._zones:
            raise CounterError("no RAPL counters")

    def read(self) -> int:
        """Return the millijoules since this object was made. Each counter may have started again at 0 once."""
        for zone, range_uj in self._zones.items():
            now_uj = int(_text(zone / "energy_uj"))
            used_uj = now_uj - self._last_uj[zone]
            self._total_uj += used_uj if used_uj >= 0 else used_uj + range_uj
            self._last_uj[zone] = now_uj
        return self._total_uj // 1000


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except PermissionError:
        raise CounterError("RAPL is for root only") from None
    except OSError as error:
        raise CounterError(f"RAPL: {error.strerror}") from None


Counter = GpuCounter | CpuCounter
"""A counter of energy, with `read`: millijoules since some moment; they never fall. Errors: CounterError."""


def open_counter(make: Callable[[], Counter]) -> tuple[Counter | None, str]:
    """Return a counter, or None and the reason why there is none."""
    try:
        return make(), ""
    except (CounterError, ValueError) as error:
        return None, str(error)


class EnergyMeter:
    """Sums the energy of this rank's counters. A thread of its own reads them, because a driver may take long."""

    def __init__(self, counters: Mapping[str, Counter], every_s: float = EVERY_S) -> None:
        self._counters = dict(counters)
        self._first_mj: dict[str, int] = {}
        self._used_mj = dict.fromkeys(counters, 0)
        self.failed: set[str] = set()
        self._reading = threading.Lock()
        self._ended = threading.Event()
        self.read()
        self._thread = threading.Thread(target=self._run, args=(every_s,), name="energy", daemon=True)
        if counters:
            self._thread.start()

    def used_mj(self) -> dict[str, int]:
        """Return the millijoules by kind from the construction to the last reading. Any thread may call it."""
        return dict(self._used_mj)

    def read(self) -> None:
        """Read the counters now; do not wait for a thread that hangs in a driver. A failed counter stays failed."""
        if not self._reading.acquire(timeout=1.0):
            return
        try:
            for kind, counter in self._counters.items():
                try:
                    now_mj = counter.read()
                except Exception:  # also a library's own; a sum without it would be too small
                    self.failed.add(kind)
                    continue
                self._used_mj[kind] = now_mj - self._first_mj.setdefault(kind, now_mj)
        finally:
            self._reading.release()

    def close(self) -> None:
        """Stop reading."""
        self._ended.set()
        if self._counters:
            self._thread.join(1.0)

    def _run(self, every_s: float) -> None:
        while not self._ended.wait(every_s):
            self.read()
