"""What is installed in this Python: torch, Horovod, and for what that was built."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from importlib import metadata

from hvdtrain.doctor.gather.child import Answer, ask
from hvdtrain.errors import HorovodError
from hvdtrain.install import record

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
class Installation:
    """Packages of this Python.

    Attributes:
        packages: versions, None where not installed.
        torch, horovod: what they say of themselves, each in a process of its own.
        record: what the installed Horovod was built for.
        mismatch: why that cannot run here.
    """

    packages: Mapping[str, str | None]
    torch: Answer
    horovod: Answer
    record: record.BuildRecord | None = None
    mismatch: str | None = None


def installation(pool: Executor) -> Installation:
    """Find out what is installed; takes as long as importing torch and Horovod."""
    torch, horovod = pool.submit(ask, _TORCH), pool.submit(ask, _HOROVOD)
    return Installation(
        packages={name: _version(name) for name in PACKAGES},
        record=record.installed(),
        mismatch=_mismatch(),
        torch=torch.result(),
        horovod=horovod.result(),
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
