"""What may not fit in an installation: what, how it is provoked, the finding that names it, its level, its cure."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from hvdtrain.doctor.facts.child import Answer
from hvdtrain.doctor.facts.installation import LinkedLibrary
from tests.doctor.facts import HOROVOD, MPICH, ON_GPU, TORCH, WELL
from tests.doctor.provoke import (
    BUILD,
    fake,
    horovod_says,
    with_horovod,
)
from tests.support.doctor import horovod_of_version, horovod_that_does

GPUS = {"torch": Answer(ON_GPU)}

ROWS: list[Any] = [
    ("there is no Horovod: pip cannot build it", fake(installation={"record": None}), "horovod", "warning", BUILD),
    ("a Horovod of stock sources", with_horovod(horovod_of_version, "0.28.1"), "horovod_build", "warning", BUILD),
    (
        "torch was changed after the build",
        with_horovod(horovod_of_version, "0.28.1+torch1.13.0.cu117.openmpi4.1.8"),
        "horovod",
        "broken",
        BUILD,
    ),
    (
        "an upgraded torch gives undefined symbols",
        with_horovod(
            horovod_that_does, "raise ImportError('mpi_lib_v2.so: undefined symbol: _ZN2at4_ops5zeros4callEv')"
        ),
        "horovod",
        "broken",
        BUILD,
    ),
    (
        "the NCCL of the build is gone, as Horovod says",
        horovod_says("ImportError: libnccl.so.2: cannot open shared object file"),
        "horovod",
        "broken",
        "--gpu nccl, which uses the NCCL of torch",
    ),
    (
        "the NCCL of the build is gone, as its file says",
        fake(installation={"nccl": LinkedLibrary("libnccl.so.2", None, (Path("/gone/nccl/lib"),))}),
        "libnccl",
        "broken",
        "--gpu nccl",
    ),
    (
        "another NCCL than the one of the build",
        fake(
            installation={
                **GPUS,
                "nccl": LinkedLibrary("libnccl.so.2", Path("/n/libnccl.so.2")),
                "record": dataclasses.replace(WELL.installation.record, nccl="2.18"),  # type: ignore[type-var]
            }
        ),
        "libnccl",
        "warning",
        BUILD,
    ),
    (
        "the MPI of the build is gone: its module is not loaded",
        horovod_says("ImportError: libmpi.so.40: cannot open shared object file"),
        "horovod",
        "broken",
        "load the module of that MPI",
    ),
    (
        "Horovod's wheel names the environment in which it was built, which is gone",
        fake(mpi={"library": dataclasses.replace(MPICH, path=None), "missing_folders": (Path("/gone/lib"),)}),
        "libmpi",
        "warning",
        "load the module",
    ),
    (
        "Python 3.12 and no distutils",
        fake(installation={"python": (3, 12), "distutils": False}),
        "distutils",
        "warning",
        "pip install setuptools",
    ),
    (
        "no distutils, as Horovod says",
        horovod_says("ModuleNotFoundError: No module named 'distutils'"),
        "horovod",
        "broken",
        "pip install setuptools",
    ),
    (
        "a package that Horovod needs and does not name",
        horovod_says("ModuleNotFoundError: No module named 'cloudpickle'"),
        "horovod",
        "broken",
        "pip install cloudpickle",
    ),
    (
        "a wheel of a newer system",
        horovod_says("ImportError: libstdc++.so.6: version `GLIBCXX_3.4.32' not found"),
        "horovod",
        "broken",
        "on this machine",
    ),
    (
        "built without torch in sight",
        horovod_says("ImportError: Extension horovod.torch has not been built"),
        "horovod",
        "broken",
        BUILD,
    ),
    (
        "a GPU build without NCCL",
        fake(installation={**GPUS, "horovod": Answer(HOROVOD | {"cuda": True})}),
        "nccl",
        "warning",
        "--gpu nccl",
    ),
    ("GPUs, and a torch for the CPU", fake(gpu={"count": 8}), "gpus", "warning", "install a torch with CUDA"),
    (
        "GPUs that a variable hides",
        fake(
            gpu={"count": 8},
            environ={"CUDA_VISIBLE_DEVICES": ""},
            installation={"torch": Answer(TORCH | {"cuda": "13.0"})},
        ),
        "gpus",
        "warning",
        "unset CUDA_VISIBLE_DEVICES",
    ),
    (
        "a driver too old for torch's CUDA",
        fake(gpu={"count": 8, "driver": "535.104", "driver_cuda": (12, 2)}, installation=GPUS),
        "driver",
        "broken",
        "580",
    ),
    ("no driver", fake(gpu={"count": 8}, installation=GPUS), "driver", "broken", "nvidia-smi"),
    (
        "a container without the driver's library",
        fake(gpu={"count": 8, "driver": "580.9"}, installation=GPUS),
        "driver",
        "broken",
        "--gpus all",
    ),
]
