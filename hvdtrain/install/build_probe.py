"""Find what a build of Horovod needs, by reading files and running programs. torch is not imported."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path
from tempfile import gettempdir

from hvdtrain.files import read_text_or_empty
from hvdtrain.install.prerequisites import FoundCompiler, FoundCuda, FoundMpi, FoundNccl, FoundPython, FoundTorch, Probe
from hvdtrain.install.versions import TorchBuild, has_remote_shell, identify_by_compiler, identify_mpi
from hvdtrain.programs import output

# Modules that Horovod imports at build time and run time, and their packages.
REQUIREMENTS = {
    "setuptools": "setuptools",
    "wheel": "wheel",
    "packaging": "packaging",
    "cffi": "cffi",
    "cloudpickle": "cloudpickle",
    "psutil": "psutil",
    "yaml": "pyyaml",
}

_CONSTANT = re.compile(r"""^(\w+)(?::[^=\n]*)? *= *['"]([^'"\n]+)['"]""", re.MULTILINE)
"""A constant text of a Python module, such as those in torch's version.py."""

_OTHER_COMPILERS = re.compile(r"^(nvc\+\+|pgc\+\+|icpc|icpx|Intel\(R\)|Cray|IBM) ", re.MULTILINE)
"""What ``--version`` of a compiler that cannot replace g++ begins with."""


def probe(environ: Mapping[str, str]) -> Probe:
    """Gather all facts. Runs mpirun, the compiler and nvcc for their versions."""
    python = find_python()
    torch = find_torch()
    cuda = find_cuda(environ)
    cache = cache_folder(environ) / "horovod"
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    return Probe(
        python=python,
        torch=torch,
        mpi=find_mpi(environ),
        compiler=find_compiler(environ),
        cmake=_find_cmake(python, environ),
        make=_program("make", [], environ),
        cuda=cuda,
        nccl=find_nccl(environ, torch, python.site),
        machine=os.uname().machine,
        glibc=" ".join(platform.libc_ver()),
        arch_flags=_arch_flags(),
        cores=len(os.sched_getaffinity(0)),
        cache=cache,
        free_bytes=shutil.disk_usage(existing).free,
        is_root=os.geteuid() == 0,
        remote_shell=has_remote_shell(environ),
        cache_problem="" if os.access(existing, os.W_OK | os.X_OK) else f"no permission to write to {existing}",
        environ=dict(environ),
    )


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return the cache folder, which can be removed at any time."""
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvdtrain"


def substitute_folder() -> Path:
    """Return the folder of this user to use if the cache folder is not writable."""
    return Path(gettempdir()) / f"hvdtrain-{os.getuid()}"


def is_mine(place: Path) -> bool:
    """Return whether the user owns a folder and its parent. Others may write to the system's temporary folder."""
    try:
        return all(folder.lstat().st_uid == os.getuid() for folder in (place, place.parent))
    except OSError:
        return False


def find_python() -> FoundPython:
    """Describe the running interpreter."""
    version = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return FoundPython(
        executable=sys.executable,
        tag=f"{version}-{version}{getattr(sys, 'abiflags', '')}",
        platform=re.sub(r"[-.]", "_", sysconfig.get_platform()),
        prefix=Path(sys.prefix),
        site=Path(sysconfig.get_path("platlib")),
        has_headers=(Path(sysconfig.get_path("include")) / "Python.h").exists(),
        # Not importlib.util: a search for pip makes setuptools' finder leave distutils to the standard library.
        # Later imports of setuptools in this process then fail (before Python 3.12).
        has_pip=PathFinder.find_spec("pip") is not None,
        missing=tuple(name for module, name in REQUIREMENTS.items() if importlib.util.find_spec(module) is None),
    )


def find_torch(path: Iterable[Path] | None = None) -> FoundTorch | None:
    """Find torch and read its ``version.py``; None if there is no torch. ``path``: folders to search."""
    spec = importlib.util.find_spec("torch")
    found = spec.submodule_search_locations if spec else None
    roots = map(Path, found or ()) if path is None else (folder / "torch" for folder in path)
    for root in roots:
        if (root / "version.py").is_file():
            values = dict(_CONSTANT.findall((root / "version.py").read_text()))
            if version := values.get("__version__"):
                build = TorchBuild.from_strings(version, values.get("cuda"))
                source = f"{values.get('git_version', '')} {_cxx11_abi(root)}".strip()
                return FoundTorch(build, root, rocm="hip" in values, source=source)
    return None


def _cxx11_abi(torch: Path) -> str:
    """Return the C++ ABI in torch's settings for CMake; "" for a torch that names none, with that of the compiler."""
    settings = read_text_or_empty(torch / "share/cmake/Torch/TorchConfig.cmake")
    found = re.search(r"_GLIBCXX_USE_CXX11_ABI=\d", settings)
    return found[0] if found else ""


def find_mpi(environ: Mapping[str, str], *, to_build: bool = True) -> FoundMpi | None:
    """Find an MPI: in this environment, on PATH, or where the base interpreter or torch is installed.

    `to_build`: whether it needs an mpicxx. Without mpirun it counts if there is an srun to start its ranks. Cray's
    module names the folder of its mpicxx only in a variable: https://cpe.ext.hpe.com/docs/latest/mpt/mpich/intro_mpi.html.
    """
    folders = [Path(sys.prefix) / "bin"]
    folders += [Path(part) for part in environ.get("PATH", os.defpath).split(os.pathsep) if part]
    folders.append(Path(sys.base_prefix) / "bin")
    torch = find_torch()
    if torch and len(torch.root.parents) > 3:
        folders.append(torch.root.parents[3] / "bin")  # PREFIX/lib/pythonX.Y/site-packages/torch
    folders += [folder / "bin" for folder in _named(environ, "CRAY_MPICH_DIR", "MPICH_DIR")]
    has_srun = _program("srun", [], environ) is not None
    for folder in folders:
        mpicxx, mpirun = folder / "mpicxx", folder / "mpirun"
        if to_build and not os.access(mpicxx, os.X_OK):
            continue
        if build := identify_mpi(mpirun, environ):
            return FoundMpi(build, mpicxx, mpirun)
        if has_srun and not mpirun.exists() and (build := identify_by_compiler(mpicxx, environ)):
            return FoundMpi(build, mpicxx, None)
    return None


def find_compiler(environ: Mapping[str, str]) -> FoundCompiler | None:
    """Find the C++ compiler: $CXX, g++ or c++.

    Modules set $CXX to compilers that differ from g++ in options and rules of arithmetic, such as NVIDIA's and Intel's.
    They are replaced by g++.
    """
    chosen, own = environ.get("CXX"), _program("g++", [], environ) or _program("c++", [], environ)
    if chosen and _OTHER_COMPILERS.search(output([*chosen.split(), "--version"], environ)):
        return replace(found, instead_of=chosen) if own and (found := _ask_compiler(own, environ)) else None
    return _ask_compiler(chosen or own, environ)


def _ask_compiler(command: str | None, environ: Mapping[str, str]) -> FoundCompiler | None:
    if not command:
        return None
    says = output([*command.split(), "--version"], environ)
    number = output([*command.split(), "-dumpfullversion", "-dumpversion"], environ).strip()
    if not re.match(r"\d", number):
        return None
    path = Path(_program(command.split()[0], [], environ) or command.split()[0]).resolve()
    return FoundCompiler(command, "clang" if "clang" in says else "gcc", number.split()[0], str(path))


def _find_cmake(python: FoundPython, environ: Mapping[str, str]) -> str | None:
    cmake = _program("cmake", [python.prefix / "bin"], environ)
    version = re.search(r"cmake version (\d+)\.(\d+)", output([cmake, "--version"], environ)) if cmake else None
    return cmake if version and (int(version[1]), int(version[2])) >= (3, 13) else None


def find_cuda(environ: Mapping[str, str]) -> FoundCuda | None:
    """Find a CUDA toolkit: named by a variable, else that of nvcc on PATH, else in conda or /usr/local/cuda."""
    homes = _named(environ, "HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH", "CUDA_ROOT", "EBROOTCUDA")
    on_path = _program("nvcc", [], environ)
    if on_path:
        homes.append(Path(on_path).resolve().parent.parent)
    for home in [*homes, *_named(environ, "CONDA_PREFIX"), Path("/usr/local/cuda")]:
        nvcc = home / "bin" / "nvcc"
        # On PATH there may be only a script that calls an nvcc elsewhere. The headers show a real toolkit.
        headers = [home / "include/cuda.h", *home.glob("targets/*/include/cuda.h")]  # conda's are in targets
        if os.access(nvcc, os.X_OK) and any(header.exists() for header in headers):
            version = re.search(r"release (\d+\.\d+)", output([str(nvcc), "--version"], environ))
            numbers = re.findall(r"compute_(\d+)\s", output([str(nvcc), "--list-gpu-arch"], environ) + "\n")
            if version:
                return FoundCuda(home, version[1], tuple(sorted({int(number) for number in numbers})))
    return None


def find_nccl(environ: Mapping[str, str], torch: FoundTorch | None, site: Path) -> FoundNccl | None:
    """Find NCCL. The one of torch is preferred, because torch has loaded it when Horovod loads.

    ``site`` is the folder of this environment's packages. torch is there, or in a folder that the environment shares.
    """
    homes = [torch.root.parent / "nvidia" / "nccl"] if torch else []
    homes += _named(environ, "HOROVOD_NCCL_HOME", "NCCL_HOME", "NCCL_ROOT", "NCCL_DIR", "EBROOTNCCL", "CONDA_PREFIX")
    homes += [Path("/usr"), Path("/usr/local")]
    for home in homes:
        header = home / "include" / "nccl.h"
        for folder in ("lib", "lib64", f"lib/{os.uname().machine}-linux-gnu"):
            library = home / folder / "libnccl.so.2"
            if header.is_file() and library.exists():
                numbers = dict(re.findall(r"#define NCCL_(MAJOR|MINOR)\s+(\d+)", header.read_text()))
                version = f"{numbers['MAJOR']}.{numbers['MINOR']}"
                return FoundNccl(header.parent, library, version, home.is_relative_to(site))
    return None


def _named(environ: Mapping[str, str], *variables: str) -> list[Path]:
    """Return the folders that variables name."""
    return [Path(environ[name]) for name in variables if environ.get(name)]


def _arch_flags() -> tuple[str, ...]:
    """Return flags for vector instructions of this processor that Horovod's half-precision code uses."""
    found = re.search(r"^flags\s*:.*$", read_text_or_empty(Path("/proc/cpuinfo")), re.M)
    flags = found[0].split() if found else []
    return tuple(f"-m{name}" for name in ("f16c", "avx", "fma") if name in flags)


def _program(name: str, first: list[Path], environ: Mapping[str, str]) -> str | None:
    path = os.pathsep.join([*map(str, first), environ.get("PATH", os.defpath)])
    return shutil.which(name, path=path)
