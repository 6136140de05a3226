"""What building Horovod will do, worked out before anything is done: a pure function of what is at hand."""

from __future__ import annotations

import hashlib
import shlex
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import BuildError
from hvdtrain.install import compiler, proof
from hvdtrain.install.build_facts import Probe
from hvdtrain.install.prerequisites import Ready, ready
from hvdtrain.install.steps import Step
from hvdtrain.install.versions import Label

HOROVOD = "0.28.1"
SDIST = f"horovod-{HOROVOD}.tar.gz"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
RECIPE = f"10 {compiler.digest()}"
"""Part of the cache key. Its number is raised where the same inputs and changes give another wheel."""

# Never passed on to the build: settings of other builds, and those of a `make` that calls us.
DROPPED_PREFIXES = ("HOROVOD_", "MAKE", "MFLAGS", "GNUMAKEFLAGS", "OMPI_COMM_", "PMI_", "PMIX_RANK", "PMIX_NAMESPACE")

_BARE = ("--no-deps", "--no-build-isolation")  # Horovod's set-up has to see torch


@dataclass(frozen=True)
class BuildPlan:
    """Everything that the build will set, write and run."""

    version: str
    """The distribution's version: Horovod's own with our label."""
    key: str
    label: Label
    gpu: str
    """nccl; copy: GPU tensors go by the CPU's memory; none: CPU tensors only."""
    cache: Path
    environment: tuple[tuple[str, str], ...]
    """Set for compiling."""
    proof_environment: tuple[tuple[str, str], ...]
    """Set for the proof."""
    wrapper: str
    steps: tuple[Step, ...]
    sdist: Path
    wheel: Path
    nccl_links: tuple[tuple[str, str], ...] = ()
    """Links to make, (relative to the scratch folder, target)."""

    @property
    def scratch(self) -> Path:
        """Where the build happens; removed before and after."""
        return scratch_of(self.cache, self.key)

    @property
    def log(self) -> Path:
        """Where the output of all steps goes."""
        return self.cache / f"{self.key}.log"

    def step(self, name: str) -> Step:
        """The step of this name."""
        return next(step for step in self.steps if step.name == name)

    def __str__(self) -> str:
        lines = [f"Horovod {self.version}, GPU operations: {self.gpu}", f"wheel: {self.wheel}", f"log: {self.log}"]
        lines += ["", "environment of the compilation:"]
        lines += [f"  {name}={shlex.quote(value)}" for name, value in self.environment]
        lines += ["environment of the proof:"]
        lines += [f"  {name}={shlex.quote(value)}" for name, value in self.proof_environment]
        lines += [f"not passed on: {', '.join(name + '*' for name in DROPPED_PREFIXES)}"]
        lines += ["", f"{self.scratch / 'cxx'}:", *(f"  {line}" for line in self.wrapper.splitlines())]
        lines += [f"link: {self.scratch / name} -> {target}" for name, target in self.nccl_links]
        lines += ["", "commands:"]
        lines += [f"  {shlex.join(step.argv)}" for step in self.steps]
        return "\n".join(lines)


def plan(probe: Probe, gpu: str = "auto") -> BuildPlan:
    """Plan a build.

    Args:
        probe: what is at hand.
        gpu: ``nccl``, ``none`` or ``auto``: nccl when torch has CUDA and there is a toolkit.

    Raises:
        BuildError: something that the build needs is missing; it says what, and the command that mends it.
    """
    have = ready(probe, gpu)
    nccl = have.nccl.version if have.nccl else None
    label = Label(have.torch.build, have.mpi.build, nccl)
    key = _key(probe, have, label)
    scratch = scratch_of(probe.cache, key)
    version = f"{HOROVOD}+{label}"
    sdist = probe.cache / "sdist" / SDIST
    wheel = probe.cache / key / f"horovod-{version}-{probe.python.tag}-{probe.python.platform}.whl"
    script = str(Path(compiler.__file__).resolve())
    wrapper = compiler.wrapper_text(
        probe.python.executable, script, have.compiler.command, have.standard, _relocations(probe, have, scratch)
    )
    return BuildPlan(
        version=version,
        key=key,
        label=label,
        gpu=have.gpu,
        cache=probe.cache,
        environment=tuple(sorted(_environment(probe, have, scratch, label).items())),
        proof_environment=tuple(sorted(proof.environment(probe).items())),
        wrapper=wrapper,
        steps=_steps(probe, have, scratch, sdist, wheel),
        sdist=sdist,
        wheel=wheel,
        nccl_links=_nccl_links(have),
    )


def fetching(python: str, folder: Path) -> Step:
    """Fetch Horovod's source into a folder, by an interpreter's pip."""
    pip = (python, "-m", "pip", "--disable-pip-version-check", "download", *_BARE)
    argv = (*pip, "--no-binary", "horovod", "--dest", str(folder), f"horovod=={HOROVOD}")
    return Step("sdist", "fetching Horovod's source", "5 s", argv)


def scratch_of(cache: Path, key: str) -> Path:
    """Give the folder in which a key is built."""
    return cache / f"{key}.build"


def _environment(probe: Probe, have: Ready, scratch: Path, label: Label) -> dict[str, str]:
    first = [str(have.mpi.mpicxx.parent), str(Path(probe.python.executable).parent)]
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
    if have.cmake:
        values["HOROVOD_CMAKE"] = have.cmake
    if probe.arch_flags:
        values["HOROVOD_BUILD_ARCH_FLAGS"] = " ".join(probe.arch_flags)
    if have.cuda:
        first.append(str(have.cuda.home / "bin"))
        values["CUDA_HOME"] = values["HOROVOD_CUDA_HOME"] = str(have.cuda.home)
        if have.cuda_archs:
            values["HOROVOD_BUILD_CUDA_CC_LIST"] = have.cuda_archs
    if have.nccl:
        values["HOROVOD_GPU_OPERATIONS"] = "NCCL"
        values["HOROVOD_NCCL_HOME"] = str(scratch / "nccl")
        values["HOROVOD_NCCL_LINK"] = "SHARED"
    values["PATH"] = ":".join([*dict.fromkeys(first), probe.environ.get("PATH", "/usr/bin:/bin")])
    return values


def _relocations(probe: Probe, have: Ready, scratch: Path) -> list[tuple[str, str]]:
    """Where run paths point from: Horovod's library lies in SITE/horovod/torch."""
    site, prefix = probe.python.site, probe.python.prefix
    library = site / "horovod" / "torch"
    table: list[tuple[str, str]] = []
    if have.nccl:
        target = "$ORIGIN/../../nvidia/nccl/lib" if have.nccl.in_site else str(have.nccl.library.parent)
        table.append((str(scratch / "nccl" / "lib"), target))
    table.append((str(scratch), ""))
    for folder, up in ((site, "$ORIGIN/../.."), (prefix, "$ORIGIN/" + _up(prefix, library))):
        table += [(str(path), up) for path in dict.fromkeys((folder, folder.resolve()))]
    return table


def _up(folder: Path, below: Path) -> str:
    """Give the ``..`` steps from a path below a folder up to it; none when it is not below."""
    if not below.is_relative_to(folder):
        raise BuildError(
            "The environment has an unusual shape.",
            expected=f"its packages below its prefix {folder}",
            found=str(below),
            next_step="build in a virtual environment: python3 -m venv .venv",
        )
    return "/".join([".."] * len(below.relative_to(folder).parts))


def _nccl_links(have: Ready) -> tuple[tuple[str, str], ...]:
    if have.nccl is None:
        return ()
    header, library = str(have.nccl.include), str(have.nccl.library)
    return (("nccl/include", header), ("nccl/lib/libnccl.so", library), ("nccl/lib/libnccl.so.2", library))


def _key(probe: Probe, have: Ready, label: Label) -> str:
    """Name the wheel by all that decides what is in it; the parts a reader asks for stand in clear."""
    mpi_is_inside = have.mpi.mpicxx.is_relative_to(probe.python.prefix)
    hidden = [
        RECIPE,
        HOROVOD,
        "" if mpi_is_inside else str(have.mpi.mpicxx),
        have.standard,
        *probe.arch_flags,
        *(replacement for _, replacement in _relocations(probe, have, Path("/scratch"))),
        *([str(have.cuda.home), have.cuda.version, have.cuda_archs] if have.cuda else []),
    ]
    digest = hashlib.sha256("\n".join(hidden).encode()).hexdigest()[:8]
    compiled = f"{have.compiler.name}{have.compiler.version}"
    return "-".join([str(label), probe.python.tag.split("-")[-1], compiled, have.gpu, probe.machine, digest])


def _steps(probe: Probe, have: Ready, scratch: Path, sdist: Path, wheel: Path) -> tuple[Step, ...]:
    pip = (probe.python.executable, "-m", "pip", "--disable-pip-version-check")
    make = (*pip, "wheel", "-v", *_BARE, "--no-cache-dir", "--wheel-dir", str(scratch / "wheel"), str(sdist))
    install = (*pip, "install", "--no-deps", "--no-index", "--force-reinstall", str(wheel))
    minutes = "2 min on 2 cores" if have.gpu == "none" else "3 min on 2 cores"
    steps = [
        fetching(probe.python.executable, scratch / "sdist"),
        Step("compile", "compiling Horovod", minutes, make),
        Step("install", "installing the wheel", "3 s", install),
        Step("proof", "proving it by an allreduce of two ranks", "10 s", proof.command(probe, have.mpi), 120),
    ]
    if have.missing:
        needed = (*pip, "install", *have.missing)
        steps.insert(0, Step("requirements", "installing what the build needs", "10 s", needed))
    return tuple(steps)
