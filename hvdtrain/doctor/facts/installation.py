"""Facts about the packages in this Python environment: torch, Horovod, and what Horovod was built for."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from hvdtrain.doctor.facts.child import LOADED, Answer, ask
from hvdtrain.errors import HorovodError
from hvdtrain.install import record
from hvdtrain.runtime.mpi import Linkage, find_needed, horovod_library, read_linkage

PACKAGES = ("hvdtrain", "numpy", "transformers")

_TORCH = """
import json, warnings
with warnings.catch_warnings(record=True) as messages:
    warnings.simplefilter("always")
    import torch
    torch.cuda.is_available()
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    gpus = [gpu.name for gpu in found]
    pci = [(gpu.pci_domain_id, gpu.pci_bus_id, gpu.pci_device_id) for gpu in found if hasattr(gpu, "pci_bus_id")]
values = {"version": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads(), "gpus": gpus,
          "pci": ["%04x:%02x:%02x.0" % address for address in pci],
          "driver_warnings": [str(warning.message) for warning in messages if "driver" in str(warning.message).lower()]}
if torch.version.cuda:
    try:
        values["nccl"] = ".".join(map(str, torch.cuda.nccl.version()[:2]))
    except (AttributeError, RuntimeError):  # a torch that was built without NCCL
        pass
if gpus:
    values["capability"] = min(torch.cuda.get_device_capability(index) for index in range(len(gpus)))
    try:
        torch.empty(1 << 26, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        values["pinned"] = str(error).splitlines()[0]
print(json.dumps(values))
"""
_HOROVOD = f"""
import json, horovod, horovod.torch as hvd
{LOADED}
print(json.dumps({{"version": horovod.__version__, "mpi": bool(hvd.mpi_built()), "gloo": bool(hvd.gloo_built()),
                  "nccl": bool(hvd.nccl_built()), "cuda": bool(hvd.cuda_built()), "libmpi": loaded("libmpi.so"),
                  "libnccl": loaded("libnccl.so")}}))
"""


@dataclass(frozen=True)
class LinkedLibrary:
    """A library that Horovod is linked to. ``path`` is None if it is missing; Horovod searches ``folders``."""

    soname: str
    path: Path | None
    folders: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Installation:
    """The packages in this Python environment."""

    packages: Mapping[str, str | None]  # version by name; None if not installed
    torch: Answer  # what torch reports about itself, in a child process
    horovod: Answer  # the same of Horovod
    record: record.BuildRecord | None = None  # what the installed Horovod was built for
    mismatch: str | None = None  # why this Horovod cannot run here
    nccl: LinkedLibrary | None = None  # the libnccl that Horovod's library needs
    python: tuple[int, int] = (3, 11)  # major and minor version of the interpreter
    distutils: bool = True  # whether a module of that name exists


def installation(environ: Mapping[str, str], pool: Executor) -> Installation:
    """Gather the facts. This takes as long as importing torch and Horovod."""
    torch, horovod = pool.submit(ask, _TORCH), pool.submit(ask, _HOROVOD)
    return Installation(
        packages={name: package_version(name) for name in PACKAGES},
        record=record.installed(),
        mismatch=horovod_mismatch(),
        nccl=find_nccl(horovod_library(), environ),
        python=sys.version_info[:2],
        distutils=sys.version_info < (3, 12) or importlib.util.find_spec("distutils") is not None,
        torch=torch.result(),
        horovod=horovod.result(),
    )


def find_nccl(library: Path | None, environ: Mapping[str, str]) -> LinkedLibrary | None:
    """Find the libnccl that a library is linked to."""
    linkage = read_linkage(library) if library else Linkage()
    soname = next((name for name in linkage.needed if name.startswith("libnccl.so")), None)
    if soname is None:
        return None
    path = find_needed(soname, linkage, environ.get("LD_LIBRARY_PATH", ""))
    return LinkedLibrary(soname, path, (*linkage.rpath, *linkage.runpath))


def package_version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def horovod_mismatch() -> str | None:
    """Return why the installed Horovod cannot run here, or None."""
    try:
        record.check()
    except HorovodError as error:
        return str(error)
    return None
