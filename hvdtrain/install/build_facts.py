"""The facts that the plan of a build depends on. `build_probe.probe` gathers them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.install.versions import MpiBuild, TorchBuild


@dataclass(frozen=True)
class FoundPython:
    """The running interpreter. ``site``: folder for wheels; ``missing``: packages that the build lacks."""

    executable: str
    tag: str
    platform: str
    prefix: Path
    site: Path
    has_headers: bool
    has_pip: bool
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class FoundTorch:
    """The torch that Python would import, and its folder. ``source``: its commit and the ABI of its C++ strings."""

    build: TorchBuild
    root: Path
    rocm: bool = False
    source: str = ""


@dataclass(frozen=True)
class FoundMpi:
    """An MPI with mpicxx and mpirun in the same folder. ``mpirun`` is None where only srun starts its ranks."""

    build: MpiBuild
    mpicxx: Path
    mpirun: Path | None


@dataclass(frozen=True)
class FoundCompiler:
    """A C++ compiler. ``name`` is gcc or clang. ``path``: its file; ``instead_of``: an unsuitable one in $CXX."""

    command: str
    name: str
    version: str
    path: str = ""
    instead_of: str = ""

    @property
    def major(self) -> int:
        """The major version."""
        return int(self.version.split(".")[0])


@dataclass(frozen=True)
class FoundCuda:
    """A CUDA toolkit. ``architectures``: targets of its nvcc, such as 75 for sm_75.

    ``home`` is relative to the scratch folder of the build for a toolkit that the build fetches.
    """

    home: Path
    version: str
    architectures: tuple[int, ...] = ()


@dataclass(frozen=True)
class FoundNccl:
    """An NCCL library and the folder of its header. ``in_site``: whether it is in this environment."""

    include: Path
    library: Path
    version: str
    in_site: bool


@dataclass(frozen=True)
class Probe:
    """All facts that the plan depends on."""

    python: FoundPython
    torch: FoundTorch | None
    mpi: FoundMpi | None
    compiler: FoundCompiler | None
    cmake: str | None
    make: str | None
    cuda: FoundCuda | None
    nccl: FoundNccl | None
    machine: str
    glibc: str
    arch_flags: tuple[str, ...]
    cores: int
    cache: Path
    free_bytes: int
    is_root: bool = False
    remote_shell: bool = True
    cache_problem: str = ""  # why files cannot be created in `cache`
    environ: Mapping[str, str] = field(default_factory=dict)
