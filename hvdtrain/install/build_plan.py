"""Plan a build of Horovod: settings, files and commands. Pure."""

from __future__ import annotations

import hashlib
import shlex
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import BuildError
from hvdtrain.install import compiler
from hvdtrain.install.prerequisites import FoundMpi, Probe, Ready, check_prerequisites
from hvdtrain.install.record import can_prove, proof_command, proof_environment
from hvdtrain.install.steps import Step
from hvdtrain.install.versions import Label

HOROVOD = "0.28.1"
SDIST = f"horovod-{HOROVOD}.tar.gz"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
RECIPE = f"10 {compiler.digest()}"
"""Part of the cache key. Raise its number if the same inputs and changes give another wheel."""

# Variables that the build does not inherit: settings of other builds, and of a `make` that calls us.
DROPPED_PREFIXES = ("HOROVOD_", "MAKE", "MFLAGS", "GNUMAKEFLAGS", "OMPI_COMM_", "PMI_", "PMIX_RANK", "PMIX_NAMESPACE")

GPU_MEANINGS = {"nccl": "nccl", "copy": "copied through CPU memory", "none": "none, it exchanges CPU tensors only"}
"""How a Horovod exchanges GPU tensors."""

_BARE = ("--no-deps", "--no-build-isolation")  # Horovod's setup.py imports torch


@dataclass(frozen=True)
class BuildPlan:
    """The settings, files and commands of a build."""

    version: str  # of the distribution: that of Horovod with our label
    key: str
    label: Label
    gpu: str  # a key of GPU_MEANINGS
    cache: Path
    scratch: Path  # folder of the build, removed before and after
    environment: tuple[tuple[str, str], ...]  # variables of the compilation
    proof_environment: tuple[tuple[str, str], ...]  # variables of the test
    wrapper: str
    steps: tuple[Step, ...]
    sdist: Path
    wheel: Path
    site: Path  # folder of packages into which the wheel is installed
    provable: bool = True  # whether the ranks of the test can be started here
    nccl_links: tuple[tuple[str, str], ...] = ()  # to create: (path in the scratch folder, target)
    notes: tuple[str, ...] = ()  # choices that the user may not expect

    @property
    def log(self) -> Path:
        """File with the output of all steps."""
        return self.cache / f"{self.key}.log"

    def __str__(self) -> str:
        lines = [f"Horovod {self.version}, GPU operations: {GPU_MEANINGS[self.gpu]}", *self.notes]
        lines += [f"wheel: {self.wheel}", f"log: {self.log}"]
        lines += ["", "environment of the compilation:"]
        lines += [f"  {name}={shlex.quote(value)}" for name, value in self.environment]
        lines += ["environment of the test:"]
        lines += [f"  {name}={shlex.quote(value)}" for name, value in self.proof_environment]
        lines += [f"variables not inherited: {', '.join(name + '*' for name in DROPPED_PREFIXES)}"]
        lines += ["", f"{self.scratch / 'cxx'}:", *(f"  {line}" for line in self.wrapper.splitlines())]
        lines += [f"link: {self.scratch / name} -> {target}" for name, target in self.nccl_links]
        lines += ["", "commands:"]
        lines += [f"  {shlex.join(step.argv)}" for step in self.steps]
        return "\n".join(lines)


def plan(probe: Probe, gpu: str = "auto") -> BuildPlan:
    """Plan a build. With `gpu` auto it uses nccl if torch has CUDA.

    Errors: BuildError if a prerequisite is missing. It names that and the command that installs it.
    """
    ready = check_prerequisites(probe, gpu)
    nccl = ready.nccl.version if ready.nccl else None
    label = Label(ready.torch.build, ready.mpi.build, nccl)
    key = _key(probe, ready, label)
    scratch = probe.cache / f"{key}.build"
    version = f"{HOROVOD}+{label}"
    sdist = probe.cache / "sdist" / SDIST
    wheel = probe.cache / key / f"horovod-{version}-{probe.python.tag}-{probe.python.platform}.whl"
    moved = _relocations(probe, ready, scratch)
    wrapper = compiler.wrapper_text(probe.python.executable, ready.compiler.command, ready.standard, moved)
    return BuildPlan(
        version=version,
        key=key,
        label=label,
        gpu=ready.gpu,
        cache=probe.cache,
        scratch=scratch,
        environment=tuple(sorted(_environment(probe, ready, scratch, label).items())),
        proof_environment=tuple(sorted(proof_environment(probe, ready.mpi).items())),
        wrapper=wrapper,
        steps=_steps(probe, ready, scratch, sdist, wheel),
        sdist=sdist,
        wheel=wheel,
        site=probe.python.site,
        provable=can_prove(ready.mpi, probe.environ),
        nccl_links=_nccl_links(ready),
        notes=_notes(ready),
    )


def _notes(ready: Ready) -> tuple[str, ...]:
    notes = []
    if other := ready.compiler.instead_of:
        notes.append(f"compiler: {ready.compiler.command} instead of CXX={other}, as torch is compiled with g++")
    if ready.toolkit:
        notes.append(f"no nvcc was found: fetching {ready.toolkit}, 0.1 GiB, which is removed after the build")
    return tuple(notes)


def fetch_step(python: str, folder: Path) -> Step:
    """Return the step that fetches Horovod's source into a folder, with an interpreter's pip."""
    pip = (python, "-m", "pip", "--disable-pip-version-check", "download", *_BARE)
    argv = (*pip, "--no-binary", "horovod", "--dest", str(folder), f"horovod=={HOROVOD}")
    return Step("sdist", "fetching Horovod's source", "5 s", argv)


def proof_step(probe: Probe, mpi: FoundMpi) -> Step:
    """Return the step that tests the installed Horovod."""
    return Step("proof", "testing an allreduce of two ranks", "10 s", proof_command(probe, mpi), 120)


def _environment(probe: Probe, ready: Ready, scratch: Path, label: Label) -> dict[str, str]:
    first = [str(ready.mpi.mpicxx.parent), str(Path(probe.python.executable).parent)]
    values = {
        "CMAKE_GENERATOR": "Unix Makefiles",
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # CMake 4 refuses the bundled gloo otherwise
        "CXX": str(scratch / "cxx"),
        "HOROVOD_LOCAL_VERSION": str(label),
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_MPI": "1",
        "HOROVOD_WITH_GLOO": "1",
        "MAKEFLAGS": f"-j{probe.cores}",
        "TMPDIR": str(scratch / "tmp"),
    }
    if ready.cmake:
        values["HOROVOD_CMAKE"] = ready.cmake
    if probe.arch_flags:
        values["HOROVOD_BUILD_ARCH_FLAGS"] = " ".join(probe.arch_flags)
    if ready.cuda:
        home = scratch / ready.cuda.home
        first.append(str(home / "bin"))
        values["CUDA_HOME"] = values["HOROVOD_CUDA_HOME"] = str(home)
        if ready.cuda_archs:
            values["HOROVOD_BUILD_CUDA_CC_LIST"] = ready.cuda_archs
    if ready.nccl:
        values["HOROVOD_GPU_OPERATIONS"] = "NCCL"
        values["HOROVOD_NCCL_HOME"] = str(scratch / "nccl")
        values["HOROVOD_NCCL_LINK"] = "SHARED"
    values["PATH"] = ":".join([*dict.fromkeys(first), probe.environ.get("PATH", "/usr/bin:/bin")])
    return values


def _relocations(probe: Probe, ready: Ready, scratch: Path) -> list[tuple[str, str]]:
    """Return the replacements in run paths. They start from Horovod's library in SITE/horovod/torch."""
    site, prefix = probe.python.site, probe.python.prefix
    library = site / "horovod" / "torch"
    table: list[tuple[str, str]] = []
    if ready.nccl:
        target = "$ORIGIN/../../nvidia/nccl/lib" if ready.nccl.in_site else str(ready.nccl.library.parent)
        table.append((str(scratch / "nccl" / "lib"), target))
    table.append((str(scratch), ""))
    for folder, up in ((site, "$ORIGIN/../.."), (prefix, "$ORIGIN/" + _up(prefix, library))):
        table += [(str(path), up) for path in dict.fromkeys((folder, folder.resolve()))]
    return table


def _up(folder: Path, below: Path) -> str:
    """Return the ``..`` steps from a path up to a folder that contains it."""
    if not below.is_relative_to(folder):
        raise BuildError(
            "The environment has an unexpected layout.",
            expected=f"its packages below its prefix {folder}",
            found=str(below),
            next_step="build in a virtual environment: python3 -m venv .venv",
        )
    return "/".join([".."] * len(below.relative_to(folder).parts))


def _nccl_links(ready: Ready) -> tuple[tuple[str, str], ...]:
    if ready.nccl is None:
        return ()
    header, library = str(ready.nccl.include), str(ready.nccl.library)
    return (("nccl/include", header), ("nccl/lib/libnccl.so", library), ("nccl/lib/libnccl.so.2", library))


def _key(probe: Probe, ready: Ready, label: Label) -> str:
    """Return the name of a wheel by everything that determines its content. The important parts are readable."""
    mpi_is_inside = ready.mpi.mpicxx.is_relative_to(probe.python.prefix)
    hidden = [
        RECIPE,
        HOROVOD,
        "" if mpi_is_inside else str(ready.mpi.mpicxx),
        ready.standard,
        ready.torch.source,
        ready.compiler.path,
        probe.glibc,
        *probe.arch_flags,
        *(replacement for _, replacement in _relocations(probe, ready, Path("/scratch"))),
        *([str(ready.cuda.home), ready.cuda.version, ready.cuda_archs] if ready.cuda else []),
    ]
    digest = hashlib.sha256("\n".join(hidden).encode()).hexdigest()[:8]
    compiled = f"{ready.compiler.name}{ready.compiler.version}"
    return "-".join([str(label), probe.python.tag.split("-")[-1], compiled, ready.gpu, probe.machine, digest])


def _steps(probe: Probe, ready: Ready, scratch: Path, sdist: Path, wheel: Path) -> tuple[Step, ...]:
    pip = (probe.python.executable, "-m", "pip", "--disable-pip-version-check")
    make = (*pip, "wheel", "-v", *_BARE, "--no-cache-dir", "--wheel-dir", str(scratch / "wheel"), str(sdist))
    install = (*pip, "install", "--no-deps", "--no-index", "--force-reinstall", str(wheel))
    minutes = "2 min on 2 cores" if ready.gpu == "none" else "3 min on 2 cores"
    steps = [
        fetch_step(probe.python.executable, scratch / "sdist"),
        Step("compile", "compiling Horovod", minutes, make),
        Step("install", "installing the wheel", "3 s", install),
        proof_step(probe, ready.mpi),
    ]
    if ready.toolkit:
        fetch = (*pip, "install", "--target", str(scratch / "cuda"), ready.toolkit)
        steps.insert(1, Step("toolkit", "fetching nvcc", "20 s", fetch))
    if ready.missing:
        needed = (*pip, "install", *ready.missing)
        steps.insert(0, Step("requirements", "installing build requirements", "10 s", needed))
    return tuple(steps)
