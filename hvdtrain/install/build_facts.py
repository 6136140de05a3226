"""Facts that the plan of a build depends on: plain frozen values, which `probe` finds out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.install.versions import MpiBuild, TorchBuild


@dataclass(frozen=True)
class PythonAtHand:
    """The running interpreter: ``site`` is where wheels go, ``missing`` the packages that the build needs."""

    executable: str
    tag: str
    platform: str
    prefix: Path
    site: Path
    has_headers: bool
    has_pip: bool
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class TorchAtHand:
    """The torch that would be imported, and the folder it would be imported from."""

    build: TorchBuild
    root: Path
    rocm: bool = False


@dataclass(frozen=True)
class MpiAtHand:
    """An MPI to build with: both programs stand in the same folder."""

    build: MpiBuild
    mpicxx: Path
    mpirun: Path


@dataclass(frozen=True)
class CompilerAtHand:
    """A C++ compiler: ``name`` is gcc or clang."""

    command: str
    name: str
    version: str

    @property
    def major(self) -> int:
        """The major version."""
        return int(self.version.split(".")[0])


@dataclass(frozen=True)
class CudaAtHand:
    """A CUDA toolkit: ``architectures`` are those that its nvcc can compile for, 75 for sm_75."""

    home: Path
    version: str
    architectures: tuple[int, ...] = ()


@dataclass(frozen=True)
class NcclAtHand:
    """An NCCL library with its header's folder; ``in_site`` when it came with torch's own wheel."""

    include: Path
    library: Path
    version: str
    in_site: bool


@dataclass(frozen=True)
class Probe:
    """Everything that the plan depends on."""

    python: PythonAtHand
    torch: TorchAtHand | None
    mpi: MpiAtHand | None
    compiler: CompilerAtHand | None
    cmake: str | None
    make: str | None
    cuda: CudaAtHand | None
    nccl: NcclAtHand | None
    machine: str
    arch_flags: tuple[str, ...]
    cores: int
    cache: Path
    free_bytes: int
    is_root: bool = False
    remote_shell: bool = True
    environ: Mapping[str, str] = field(default_factory=dict)
