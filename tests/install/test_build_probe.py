"""Finding what is installed: torch without importing it, an MPI by running it, the compiler, the toolkit, NCCL."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.install import build_probe as probe
from hvdtrain.install.prerequisites import FoundTorch
from hvdtrain.install.versions import MpiBuild, TorchBuild
from tests.support.launch import TIMEOUT_S


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def fake_torch(site: Path, source: str) -> FoundTorch | None:
    (site / "torch").mkdir(parents=True, exist_ok=True)
    (site / "torch" / "__init__.py").write_text("raise ImportError('executed')")
    (site / "torch" / "version.py").write_text(source)
    return probe.find_torch([site])


def test_torch_is_read_without_running_it(tmp_path: Path) -> None:
    source = "from typing import Optional\n__version__ = '2.12.1+cu130'\n"
    source += "cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\ngit_version = 'a8d6afb5'\n"
    assert probe.find_torch([tmp_path]) is None
    settings = tmp_path / "torch/share/cmake/Torch/TorchConfig.cmake"
    settings.parent.mkdir(parents=True)
    settings.write_text('set(TORCH_CXX_FLAGS "-D_GLIBCXX_USE_CXX11_ABI=0")\n')
    build, abi = TorchBuild("2.12.1", "cu130"), "a8d6afb5 _GLIBCXX_USE_CXX11_ABI=0"
    assert fake_torch(tmp_path, source) == FoundTorch(build, tmp_path / "torch", rocm=False, source=abi)
    rocm = fake_torch(tmp_path, "__version__ = '2.12.1+rocm6.4'\ncuda = None\nhip = '6.4.1'\n")
    assert rocm is not None and rocm.rocm


def test_the_installed_torch_is_named_as_it_names_itself_and_looking_leaves_setuptools_as_it_was() -> None:
    """torch.compile imports setuptools, in whatever process has looked."""
    program = (
        "import os, sys; from hvdtrain.install.build_probe import probe; found = probe(os.environ); "
        "assert 'torch' not in sys.modules and found.python.has_pip; import setuptools, torch; "
        "from hvdtrain.install.versions import TorchBuild; "
        "assert found.torch.build == TorchBuild.from_strings(torch.__version__, torch.version.cuda), found"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr


def test_an_mpi_is_one_folder_with_both_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "nothing"))
    script(tmp_path / "runtime" / "mpirun", "echo 'mpirun (Open MPI) 5.0.11'")  # no mpicxx: cannot be built with
    script(tmp_path / "full" / "mpirun", "echo 'mpirun (Open MPI) 4.1.2'")
    script(tmp_path / "full" / "mpicxx", "")
    found = probe.find_mpi({"PATH": f"{tmp_path / 'runtime'}:{tmp_path / 'full'}:/bin"})
    assert found is not None
    assert (found.build, found.mpicxx) == (MpiBuild("openmpi", "4.1.2"), tmp_path / "full" / "mpicxx")
    # The environment's own goes before the one on PATH.
    script(tmp_path / "nothing/bin/mpirun", "echo 'mpirun (Open MPI) 4.1.8'")
    script(tmp_path / "nothing/bin/mpicxx", "")
    own = probe.find_mpi({"PATH": f"{tmp_path / 'full'}:/bin"})
    assert own is not None and own.build.version == "4.1.8"


def test_an_mpi_without_mpirun_counts_where_srun_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "nothing"))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / "nothing"))
    monkeypatch.setattr(probe, "find_torch", lambda: None)
    mpicxx = script(tmp_path / "cray" / "bin" / "mpicxx", "")
    script(mpicxx.with_name("mpichversion"), "echo 'MPI VERSION    : CRAY MPICH version 8.1.28.15 (ANL base 3.4a2)'")
    environ = {"PATH": str(tmp_path / "slurm"), "CRAY_MPICH_DIR": str(tmp_path / "cray")}
    assert probe.find_mpi(environ) is None
    script(tmp_path / "slurm" / "srun", "")
    found = probe.find_mpi(environ)
    assert found is not None
    assert (found.build, found.mpicxx, found.mpirun) == (MpiBuild("mpich", "8.1.28.15"), mpicxx, None)


@pytest.mark.parametrize(
    "says",
    [
        "\nnvc++ 24.5-1 64-bit target on x86-64 Linux -tp zen3",
        "Intel(R) oneAPI DPC++/C++ Compiler 2024.2.0",
        "icpc (ICC) 2021.10.0",
        "Cray clang version 17.0.1",
    ],
)
def test_a_compiler_that_a_module_set_is_replaced_by_gcc(tmp_path: Path, says: str) -> None:
    own = script(tmp_path / "bin" / "g++", 'case "$1" in --version) echo "g++ (GCC) 12.3.0";; *) echo 12.3.0;; esac')
    other = script(tmp_path / "other", f"printf '{says}\\n'")
    found = probe.find_compiler({"CXX": str(other), "PATH": f"{tmp_path / 'bin'}:/bin"})
    assert found is not None
    assert (found.command, found.instead_of, found.path) == (str(own), str(other), str(own.resolve()))
    assert probe.find_compiler({"CXX": str(other), "PATH": str(tmp_path)}) is None
    clang = script(tmp_path / "c++", 'case "$1" in --version) echo "clang version 18.1.3";; *) echo 18.1.3;; esac')
    users = probe.find_compiler({"CXX": str(clang), "PATH": "/bin"})
    assert users is not None
    assert (users.command, users.name, users.version, users.major) == (str(clang), "clang", "18.1.3", 18)


def fake_toolkit(home: Path, version: str, *, conda: bool = False) -> Path:
    archs = "compute_75\\ncompute_80\\ncompute_90\\n"
    says = f"Cuda compilation tools, release {version}, V{version}.88"
    text = f'case "$1" in --version) echo "{says}";; *) printf "{archs}";; esac'
    script(home / "bin" / "nvcc", text)
    headers = home / ("targets/sbsa-linux/include" if conda else "include")
    headers.mkdir(parents=True)
    (headers / "cuda.h").write_text("")
    return home


def test_the_toolkit_that_is_named_goes_before_the_one_on_path(tmp_path: Path) -> None:
    named, on_path = fake_toolkit(tmp_path / "named", "12.8"), fake_toolkit(tmp_path / "path", "13.0")
    path = f"{on_path / 'bin'}:/bin"
    for environ, version in (({"PATH": path, "CUDA_HOME": str(named)}, "12.8"), ({"PATH": path}, "13.0")):
        found = probe.find_cuda(environ)
        assert found is not None
        assert (found.version, found.architectures) == (version, (75, 80, 90))
    for variable in ("CUDA_PATH", "EBROOTCUDA", "CONDA_PREFIX"):  # of a module or of conda
        home = fake_toolkit(tmp_path / variable, "12.6", conda=variable == "CONDA_PREFIX")
        found = probe.find_cuda({"PATH": "/bin", variable: str(home)})
        assert found is not None and (found.home, found.version) == (home, "12.6")


def fake_nccl(home: Path, minor: int, lib: str = "lib") -> Path:
    for name, text in (
        ("include/nccl.h", f"#define NCCL_MAJOR 2\n#define NCCL_MINOR {minor}\n"),
        (f"{lib}/libnccl.so.2", ""),
    ):
        (home / name).parent.mkdir(parents=True)
        (home / name).write_text(text)
    return home


@pytest.mark.parametrize("variable", ["HOROVOD_NCCL_HOME", "NCCL_HOME", "NCCL_ROOT", "EBROOTNCCL", "CONDA_PREFIX"])
def test_the_nccl_of_a_module_or_of_conda_is_found_and_torchs_precedes_it(tmp_path: Path, variable: str) -> None:
    home = fake_nccl(tmp_path / "system", 26, "lib64")
    environ, site = {variable: str(home)}, tmp_path / "site"
    fake_nccl(site / "nvidia" / "nccl", 29)
    torch = FoundTorch(TorchBuild("2.12.1", "cu130"), site / "torch")
    system, beside = (probe.find_nccl(environ, found, site) for found in (None, torch))
    assert system is not None and beside is not None
    assert (system.version, system.in_site, system.library) == ("2.26", False, home / "lib64/libnccl.so.2")
    assert (beside.version, beside.in_site) == ("2.29", True)
    shared = probe.find_nccl(environ, torch, tmp_path / "other")
    assert shared is not None and not shared.in_site, "torch of another environment, which this one shares"


def test_this_machine_can_be_probed() -> None:
    found = probe.probe(os.environ)
    assert found.python.executable == sys.executable
    assert found.cores == len(os.sched_getaffinity(0))
    assert found.cache.parts[-2:] == ("hvdtrain", "horovod")
    assert found.free_bytes > 0
