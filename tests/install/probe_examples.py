"""What may be at hand, as plain values: torch with and without CUDA, a machine with and without a toolkit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hvdtrain.install.prerequisites import FoundCompiler, FoundCuda, FoundMpi, FoundNccl, FoundPython, FoundTorch, Probe
from hvdtrain.install.versions import MpiBuild, TorchBuild

PREFIX = Path("/env")
SITE = PREFIX / "lib/python3.11/site-packages"

PYTHON = FoundPython("/env/bin/python", "cp311-cp311", "linux_x86_64", PREFIX, SITE, has_headers=True, has_pip=True)
TORCH_CPU = FoundTorch(TorchBuild("2.13.0", "cpu"), SITE / "torch")
TORCH_CUDA = FoundTorch(TorchBuild("2.12.1", "cu130"), SITE / "torch")
MPI = FoundMpi(MpiBuild("openmpi", "4.1.8"), PREFIX / "bin/mpicxx", PREFIX / "bin/mpirun")
GCC = FoundCompiler("/usr/bin/g++", "gcc", "12.2.0")
TOOLKIT = FoundCuda(Path("/usr/local/cuda"), "13.0", (75, 80, 86, 89, 90, 100, 103, 120))
NCCL = FoundNccl(SITE / "nvidia/nccl/include", SITE / "nvidia/nccl/lib/libnccl.so.2", "2.29", in_site=True)


def example_probe(**changes: Any) -> Probe:
    """Everything that a CPU build needs, with changes."""
    values: dict[str, Any] = {
        "python": PYTHON,
        "torch": TORCH_CPU,
        "mpi": MPI,
        "compiler": GCC,
        "cmake": "/usr/bin/cmake",
        "make": "/usr/bin/make",
        "cuda": None,
        "nccl": None,
        "machine": "x86_64",
        "glibc": "glibc 2.36",
        "arch_flags": ("-mavx",),
        "cores": 2,
        "cache": Path("/cache"),
        "free_bytes": 100 << 30,
        "environ": {"PATH": "/usr/bin"},
    }
    return Probe(**{**values, **changes})
