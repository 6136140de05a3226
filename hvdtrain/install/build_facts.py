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
    """The torch that Python would import, and its folder."""

    build: TorchBuild
    root: Path
    rocm: bool = False


@dataclass(frozen=True)
class FoundMpi:
    """An MPI with mpicxx and mpirun in the same folder."""

    build: MpiBuild
    mpicxx: Path
    mpirun: Path


@dataclass(frozen=True)
class FoundCompiler:
    """A C++ compiler. ``name`` is gcc or clang."""

    command: str
    name: str
    version: str

    @property
    def major(self) -> int:
        """The major version."""
        return int(self.version.split(".")[0])


@dataclass(frozen=True)
class FoundCuda:
    """A CUDA toolkit. ``architectures``: targets of its nvcc, such as 75 for sm_75."""

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
    arch_flags: tuple[str, ...]
    cores: int
    cache: Path
    free_bytes: int
    is_root: bool = False
    remote_shell: bool = True
    environ: Mapping[str, str] = field(default_factory=dict)
