"""Whether what is installed in this Python fits together."""

from __future__ import annotations

import re

from hvdtrain.doctor.facts import Gathered
from hvdtrain.doctor.finding import Finding
from hvdtrain.install.record import BUILD_COMMAND, BuildRecord

_NAMES = {"mpi": "MPI", "gloo": "Gloo", "nccl": "NCCL", "cuda": "CUDA"}
_RUNTIME = {
    "cloudpickle": "cloudpickle",
    "psutil": "psutil",
    "yaml": "pyyaml",
    "cffi": "cffi",
    "packaging": "packaging",
}

_IMPORT_ERRORS = (
    (
        r"undefined symbol",
        "it was built for another torch (or compiler): torch is not checked when Horovod is loaded",
        BUILD_COMMAND,
    ),
    (
        r"libnccl\S*: cannot open",
        "the NCCL that it was built with is gone: HOROVOD_NCCL_HOME named a folder that has to last",
        f"{BUILD_COMMAND} --gpu nccl, which uses the NCCL beside torch",
    ),
    (
        r"lib(mpi|open-)\S*: cannot open",
        "the MPI that it was built with is not found: its module is not loaded, or its environment is gone",
        f"load the module of that MPI; or for the one that is here: {BUILD_COMMAND}",
    ),
    (r"lib(cuda|cu\w+)\S*: cannot open", "it was built with CUDA, which is not found here", BUILD_COMMAND),
    (
        r"lib(torch|c10)\S*: cannot open",
        "it was built for a torch with other libraries, most often one with CUDA",
        BUILD_COMMAND,
    ),
    (
        r"GLIBC(XX)?_\S+' not found|version `\S+' not found",
        "it was built on a newer system than this one",
        f"{BUILD_COMMAND}   (on this machine)",
    ),
    (r"No module named 'distutils", "Python 3.12 and newer have no distutils", "pip install setuptools"),
    (
        r"has not been built|Extension \S+ has not",
        "it was built without PyTorch, as by pip install horovod with no torch in sight",
        BUILD_COMMAND,
    ),
)
"""Of errors by which importing Horovod ends: a pattern, what it means, what mends it."""


def hvdtrain(facts: Gathered) -> Finding:
    """Name the version of this package and of the interpreter."""
    version, python = facts.installation.packages["hvdtrain"], facts.machine.system["python"]
    return Finding("hvdtrain", "ok", f"{version or 'not installed,'} on Python {python}")


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
        why, mend = _why_not(answer.error)
        return Finding("horovod", "broken", record.version, f"cannot be imported: {answer.error}{why}", mend)
    parts = ", ".join(name for key, name in _NAMES.items() if answer.values[key])
    target = f", built for {record.torch}" if record.torch else ""
    return Finding("horovod", "ok", f"{record.version} with {parts}{target}", _changes(record))


def _why_not(error: str) -> tuple[str, str]:
    if missing := re.search(r"No module named '(\w+)", error):
        package = _RUNTIME.get(missing[1])
        if package:
            return "; Horovod does not name all that it needs", f"pip install {package}"
    for pattern, why, mend in _IMPORT_ERRORS:
        if re.search(pattern, error):
            return f"; {why}", mend
    return "", BUILD_COMMAND


def _changes(record: BuildRecord) -> str:
    parts = {
        "the writer of its Timeline sleeps when idle": record.quiet,
        "its threads wake when there is something to do": record.prompt,
        "its faults at ranks that are lost or join are mended": record.mended,
    }
    return ", ".join(text for text, is_so in parts.items() if is_so)


def stock_build(facts: Gathered) -> Finding | None:
    """Say what a Horovod lacks that was built by other means, or by an older version of ours."""
    record = facts.installation.record
    if record is None or facts.installation.horovod.error or (record.quiet and record.prompt and record.mended):
        return None
    lacks = {
        "a thread of rank 0 spins wherever a Timeline is made possible": not record.quiet,
        "its threads look for work once a millisecond, and who waits spins": not record.prompt,
        "when a rank is lost or joins, another one may wait until a timeout, deadlock or crash": not record.mended,
    }
    why = "; ".join(text for text, is_so in lacks.items() if is_so)
    return Finding("horovod_build", "warning", "not as hvdtrain builds it now", why, BUILD_COMMAND)


def distutils(facts: Gathered) -> Finding | None:
    """See that horovodrun finds distutils, which Python lacks from 3.12 on."""
    installed = facts.installation
    if installed.record is None or installed.python < (3, 12) or installed.distutils:
        return None
    major, minor = installed.python
    why = "horovodrun and Horovod's build import it; setuptools brings it"
    return Finding("distutils", "warning", f"not in Python {major}.{minor}", why, "pip install setuptools")


def packages(facts: Gathered) -> Finding:
    """See that the default task's packages are there."""
    there = facts.installation.packages
    found = ", ".join(f"{name} {there[name] or 'not installed'}" for name in ("transformers", "numpy"))
    if there["transformers"] is None:
        why = "the task language_model needs it"
        return Finding("packages", "warning", found, why, "pip install 'hvdtrain[lm]'")
    return Finding("packages", "ok", found)


def torch_files(facts: Gathered) -> Finding | None:
    """Name a torch whose ``torch.load(weights_only=True)`` runs code of the file's maker."""
    version = re.match(r"(\d+)\.(\d+)", str(facts.installation.torch.values.get("version", "")))
    if version is None or (int(version[1]), int(version[2])) >= (2, 10):
        return None
    why = (
        "torch.load(weights_only=True) of versions before 2.10 can run code that stands in the file (CVE-2026-24747);"
        " hvdtrain loads no such files, your own task may"
    )
    mend = f"pip install 'torch>=2.10', then {BUILD_COMMAND}"
    return Finding("torch_load", "warning", f"torch {version[0]}", why, mend)
