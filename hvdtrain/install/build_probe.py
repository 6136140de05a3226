"""What is at hand to build Horovod with: found by looking at files and asking programs, torch is not imported."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from importlib.machinery import PathFinder
from pathlib import Path

from hvdtrain.install.build_facts import (
    CompilerAtHand,
    CudaAtHand,
    MpiAtHand,
    NcclAtHand,
    Probe,
    PythonAtHand,
    TorchAtHand,
)
from hvdtrain.install.mpirun import identify_mpi
from hvdtrain.install.open_mpi import has_remote_shell
from hvdtrain.install.versions import TorchBuild
from hvdtrain.programs import run_program

# Modules that Horovod's build and its runtime import, and the packages that bring them.
REQUIREMENTS = {
    "setuptools": "setuptools",
    "wheel": "wheel",
    "packaging": "packaging",
    "cffi": "cffi",
    "cloudpickle": "cloudpickle",
    "psutil": "psutil",
    "yaml": "pyyaml",
}


def probe(environ: Mapping[str, str]) -> Probe:
    """Look around. Runs mpirun, the compiler and nvcc for their versions."""
    python = python_at_hand()
    torch = torch_at_hand()
    cuda = cuda_at_hand(environ)
    cache = cache_folder(environ) / "horovod"
    return Probe(
        python=python,
        torch=torch,
        mpi=mpi_at_hand(environ),
        compiler=compiler_at_hand(environ),
        cmake=_cmake_at_hand(python, environ),
        make=_program("make", [], environ),
        cuda=cuda,
        nccl=nccl_at_hand(environ, torch),
        machine=os.uname().machine,
        arch_flags=_arch_flags(),
        cores=len(os.sched_getaffinity(0)),
        cache=cache,
        free_bytes=shutil.disk_usage(_existing(cache)).free,
        is_root=os.geteuid() == 0,
        remote_shell=has_remote_shell(environ),
        environ=dict(environ),
    )


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Give the folder for what can be made or fetched again."""
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvdtrain"


def python_at_hand() -> PythonAtHand:
    """Describe the running interpreter."""
    version = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return PythonAtHand(
        executable=sys.executable,
        tag=f"{version}-{version}{getattr(sys, 'abiflags', '')}",
        platform=re.sub(r"[-.]", "_", sysconfig.get_platform()),
        prefix=Path(sys.prefix),
        site=Path(sysconfig.get_path("platlib")),
        has_headers=(Path(sysconfig.get_path("include")) / "Python.h").exists(),
        # Not importlib.util: asked for pip, setuptools' finder leaves distutils to the standard library for good, and
        # whatever imports setuptools in this process from then on fails (before Python 3.12).
        has_pip=PathFinder.find_spec("pip") is not None,
        missing=tuple(name for module, name in REQUIREMENTS.items() if importlib.util.find_spec(module) is None),
    )


def torch_at_hand(path: Iterable[Path] | None = None) -> TorchAtHand | None:
    """Read torch's version out of its ``version.py``; None when there is no torch. ``path``: folders to look in."""
    if path is None:
        spec = importlib.util.find_spec("torch")
        roots = list(spec.submodule_search_locations or ()) if spec else []
        candidates = [Path(root) for root in roots]
    else:
        candidates = [Path(folder) / "torch" for folder in path]
    for root in candidates:
        if (root / "version.py").is_file():
            values = _constants((root / "version.py").read_text())
            version, cuda = values.get("__version__"), values.get("cuda")
            if version:
                return TorchAtHand(TorchBuild.from_strings(version, cuda), root, rocm=bool(values.get("hip")))
    return None


def mpi_at_hand(environ: Mapping[str, str]) -> MpiAtHand | None:
    """Find an MPI: the environment's own, else on PATH, else where the base interpreter or torch is installed."""
    folders = [Path(sys.prefix) / "bin"]
    folders += [Path(part) for part in environ.get("PATH", os.defpath).split(os.pathsep) if part]
    folders.append(Path(sys.base_prefix) / "bin")
    torch = torch_at_hand()
    if torch and len(torch.root.parents) > 3:
        folders.append(torch.root.parents[3] / "bin")  # PREFIX/lib/pythonX.Y/site-packages/torch
    for folder in folders:
        mpicxx, mpirun = folder / "mpicxx", folder / "mpirun"
        if os.access(mpicxx, os.X_OK) and (build := identify_mpi(mpirun, environ)):
            return MpiAtHand(build, mpicxx, mpirun)
    return None


def _constants(source: str) -> dict[str, str | None]:
    """Collect a module's top-level assignments of strings and None, without running it."""
    values: dict[str, str | None] = {}
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Assign):
            targets, value = statement.targets, statement.value
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets, value = [statement.target], statement.value
        else:
            continue
        if isinstance(value, ast.Constant) and (value.value is None or isinstance(value.value, str)):
            values.update({target.id: value.value for target in targets if isinstance(target, ast.Name)})
    return values


def compiler_at_hand(environ: Mapping[str, str]) -> CompilerAtHand | None:
    """Find the C++ compiler: $CXX, g++ or c++."""
    command = environ.get("CXX") or _program("g++", [], environ) or _program("c++", [], environ)
    if not command:
        return None
    says = output([*command.split(), "--version"], environ)
    number = output([*command.split(), "-dumpfullversion", "-dumpversion"], environ).strip()
    if not re.match(r"\d", number):
        return None
    return CompilerAtHand(command, "clang" if "clang" in says else "gcc", number.split()[0])


def _cmake_at_hand(python: PythonAtHand, environ: Mapping[str, str]) -> str | None:
    cmake = _program("cmake", [python.prefix / "bin"], environ)
    version = re.search(r"cmake version (\d+)\.(\d+)", output([cmake, "--version"], environ)) if cmake else None
    return cmake if version and (int(version[1]), int(version[2])) >= (3, 13) else None


def cuda_at_hand(environ: Mapping[str, str]) -> CudaAtHand | None:
    """Find a CUDA toolkit: the one that is named, else that of nvcc on PATH, else the usual place."""
    homes = [Path(environ[name]) for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    on_path = _program("nvcc", [], environ)
    if on_path:
        homes.append(Path(on_path).resolve().parent.parent)
    for home in [*homes, Path("/usr/local/cuda")]:
        nvcc = home / "bin" / "nvcc"
        # A script on PATH that calls an nvcc elsewhere has no toolkit around it: the headers tell.
        if os.access(nvcc, os.X_OK) and (home / "include" / "cuda.h").exists():
            version = re.search(r"release (\d+\.\d+)", output([str(nvcc), "--version"], environ))
            numbers = re.findall(r"compute_(\d+)\s", output([str(nvcc), "--list-gpu-arch"], environ) + "\n")
            if version:
                return CudaAtHand(home, version[1], tuple(sorted({int(number) for number in numbers})))
    return None


def nccl_at_hand(environ: Mapping[str, str], torch: TorchAtHand | None) -> NcclAtHand | None:
    """Prefer the one beside torch: it is the one that torch has loaded when Horovod is."""
    homes = [(torch.root.parent / "nvidia" / "nccl", True)] if torch else []
    homes += [(Path(environ[name]), False) for name in ("HOROVOD_NCCL_HOME", "NCCL_HOME") if environ.get(name)]
    homes += [(Path("/usr"), False), (Path("/usr/local"), False)]
    for home, in_site in homes:
        header = home / "include" / "nccl.h"
        for folder in ("lib", "lib64", f"lib/{os.uname().machine}-linux-gnu"):
            library = home / folder / "libnccl.so.2"
            if header.is_file() and library.exists():
                numbers = dict(re.findall(r"#define NCCL_(MAJOR|MINOR)\s+(\d+)", header.read_text()))
                return NcclAtHand(header.parent, library, f"{numbers['MAJOR']}.{numbers['MINOR']}", in_site)
    return None


def _arch_flags() -> tuple[str, ...]:
    """Name the vector instructions that Horovod's half-precision code can use and this processor has."""
    try:
        flags = set(re.findall(r"\w+", next(re.finditer(r"^flags\s*:.*$", Path("/proc/cpuinfo").read_text(), re.M))[0]))
    except (OSError, StopIteration):
        return ()
    return tuple(f"-m{name}" for name in ("f16c", "avx", "fma") if name in flags)


def _program(name: str, first: list[Path], environ: Mapping[str, str]) -> str | None:
    path = os.pathsep.join([*map(str, first), environ.get("PATH", os.defpath)])
    return shutil.which(name, path=path)


def output(argv: list[str], environ: Mapping[str, str]) -> str:
    """Return what a program writes to stdout and stderr; "" where it cannot be run or takes more than a minute."""
    try:
        done = run_program(argv, 60, environ)
    except OSError:
        return ""
    return done.out + done.err


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.parent)
