"""Whether what is installed in this Python fits together."""

from __future__ import annotations

from hvdtrain.doctor.finding import Finding
from hvdtrain.doctor.gather import Gathered
from hvdtrain.install.record import BUILD_COMMAND, BuildRecord

_NAMES = {"mpi": "MPI", "gloo": "Gloo", "nccl": "NCCL", "cuda": "CUDA"}


def hvdtrain(facts: Gathered) -> Finding:
    """Name the version of this package and of the interpreter."""
    version, python = facts.installation.packages["hvdtrain"], facts.machine.system["python"]
    return Finding("hvdtrain", "ok", f"{version} on Python {python}")


def torch(facts: Gathered) -> Finding:
    """Import torch."""
    answer = facts.installation.torch
    if answer.error:
        return Finding("torch", "broken", answer.error, "torch cannot be imported", "pip install torch")
    values = answer.values
    cuda = f"CUDA {values['cuda']}" if values["cuda"] else "CPU only"
    return Finding("torch", "ok", f"{values['version']}, {cuda}, {values['threads']} threads in one process")


def horovod(facts: Gathered) -> Finding:
    """Import Horovod, built for this torch."""
    record, answer = facts.installation.record, facts.installation.horovod
    if record is None:
        why = "more than one rank needs it; one process trains without"
        return Finding("horovod", "warning", "not installed", why, BUILD_COMMAND)
    if facts.installation.mismatch:
        why = " ".join(facts.installation.mismatch.split())
        return Finding("horovod", "broken", record.version, why, BUILD_COMMAND)
    if answer.error:
        return Finding("horovod", "broken", record.version, f"cannot be imported: {answer.error}", BUILD_COMMAND)
    parts = ", ".join(name for key, name in _NAMES.items() if answer.values[key])
    target = f", built for {record.torch}" if record.torch else ""
    return Finding("horovod", "ok", f"{record.version} with {parts}{target}{_changes(record)}")


def _changes(record: BuildRecord) -> str:
    writer = ", the writer of its Timeline sleeps when idle" if record.quiet else ""
    prompt = ", its threads wake when there is something to do" if record.prompt else ""
    told = ", its Gloo tells of a lost rank amid a message" if record.told else ""
    return f"{writer}{prompt}{told}"


def packages(facts: Gathered) -> Finding:
    """See that the default task's packages are there."""
    there = facts.installation.packages
    found = ", ".join(f"{name} {there[name] or 'not installed'}" for name in ("transformers", "numpy"))
    if there["transformers"] is None:
        why = "the task language_model needs it"
        return Finding("packages", "warning", found, why, "pip install 'hvdtrain[lm]'")
    return Finding("packages", "ok", found)
