"""What the checks look at, found out once. What could abort in C is asked in child processes, all at the same time."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from hvdtrain.errors import HorovodError
from hvdtrain.install import record
from hvdtrain.runtime import mpi
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.runtime.host import HostFacts, read_host
from hvdtrain.runtime.mpi import MpiLibrary
from hvdtrain.runtime.tuning import Choice

PACKAGES = ("hvdtrain", "numpy", "transformers")

_TORCH = """
import json, torch
gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads(),
                  "gpus": gpus}))
"""
_HOROVOD = """
import json, horovod, horovod.torch as hvd
print(json.dumps({"version": horovod.__version__, "mpi": bool(hvd.mpi_built()), "gloo": bool(hvd.gloo_built()),
                  "nccl": bool(hvd.nccl_built()), "cuda": bool(hvd.cuda_built())}))
"""


@dataclass(frozen=True)
class Answer:
    """What a child process printed as JSON, or why it didn't."""

    values: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class Gathered:
    """Everything that the checks look at; all of it plain values.

    Attributes:
        info, choices: from `runtime.tuning.prepare`.
        packages: versions, None where not installed.
        torch, horovod: what they say of themselves, each in a process of its own.
        installed: the record of the installed Horovod; `mismatch` is why it cannot run here.
        library, library_version: the libmpi that Horovod loads.
        mpirun, mpirun_version: the mpirun on PATH.
        host, system: cores and GPUs; what the operating system says.
    """

    info: RankInfo
    choices: Sequence[Choice]
    environ: Mapping[str, str]
    packages: Mapping[str, str | None]
    torch: Answer
    horovod: Answer
    installed: record.BuildRecord | None
    mismatch: str | None
    library: MpiLibrary | None
    library_version: str | None
    mpirun: str | None
    mpirun_version: str | None
    host: HostFacts
    system: Mapping[str, str]


def ask(code: str, timeout_s: float = 60) -> Answer:
    """Run Python code in a child process and read the JSON of its last line."""
    argv = [sys.executable, "-c", code]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return Answer(error=str(error))
    if done.returncode < 0:
        return Answer(error=f"the process was ended by signal {-done.returncode}")
    try:
        return Answer(values=dict(json.loads(done.stdout.splitlines()[-1])))
    except (ValueError, IndexError, TypeError):
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return Answer(error=lines[-1].strip() if lines else f"exit status {done.returncode}")


def gather(info: RankInfo, choices: Sequence[Choice], environ: Mapping[str, str]) -> Gathered:
    """Find out everything; takes as long as importing torch and Horovod. Collective: no."""
    horovod = mpi.horovod_library()
    library = mpi.mpi_library(horovod, environ)
    mpirun = shutil.which("mpirun", path=environ.get("PATH", os.defpath))
    with ThreadPoolExecutor() as pool:
        torch_says = pool.submit(ask, _TORCH)
        horovod_says = pool.submit(ask, _HOROVOD)
        library_says = pool.submit(mpi.library_version, library.path if library else None)
        mpirun_says = pool.submit(mpi.mpirun_version, mpirun)
    return Gathered(
        info=info,
        choices=choices,
        environ=environ,
        packages={name: _version(name) for name in PACKAGES},
        torch=torch_says.result(),
        horovod=horovod_says.result(),
        installed=record.installed(),
        mismatch=_mismatch(),
        library=library,
        library_version=library_says.result(),
        mpirun=mpirun,
        mpirun_version=mpirun_says.result(),
        host=read_host(environ),
        system=_system(),
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _mismatch() -> str | None:
    try:
        record.check()
    except HorovodError as error:
        return str(error)
    return None


def _system() -> dict[str, str]:
    cpu = next((line for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "")
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu.partition(":")[2].strip() or platform.machine(),
        "memory": f"{memory_bytes / 2**30:.1f} GiB",
        "python": f"{platform.python_version()} ({sys.executable})",
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
