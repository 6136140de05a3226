"""Checks of the packages in this Python environment."""

from __future__ import annotations

import re

from hvdtrain.doctor.facts import DoctorFacts
from hvdtrain.doctor.finding import Finding, Level
from hvdtrain.install.record import BUILD_COMMAND, PROVE_NOW, BuildRecord
from hvdtrain.runtime.environment import TORCHRUN

_NAMES = {"mpi": "MPI", "gloo": "Gloo", "nccl": "NCCL", "cuda": "CUDA"}
_UNDECLARED = ("cloudpickle", "psutil", "yaml", "cffi", "packaging")

_IMPORT_ERRORS = (
    (
        r"undefined symbol",
        "it was built for another torch or with another compiler; Horovod does not check torch when it loads",
        BUILD_COMMAND,
    ),
    (
        r"libnccl\S*: cannot open",
        "the NCCL that it was built with is missing: the folder of HOROVOD_NCCL_HOME must not be removed",
        f"{BUILD_COMMAND} --gpu nccl, which uses the NCCL of torch",
    ),
    (
        r"lib(mpi|open-)\S*: cannot open",
        "the MPI that it was built with is missing: its module is not loaded, or its environment was removed",
        f"load the module of that MPI; or rebuild for the MPI of this machine: {BUILD_COMMAND}",
    ),
    (r"lib(cuda|cu\w+)\S*: cannot open", "it was built with CUDA, which is missing here", BUILD_COMMAND),
    (
        r"lib(torch|c10)\S*: cannot open",
        "it was built for a torch with other libraries, usually one with CUDA",
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
        "it was built without PyTorch, because torch was not visible to pip install horovod",
        BUILD_COMMAND,
    ),
)
"""Errors of importing Horovod: pattern, cause, fix."""


def hvdtrain(facts: DoctorFacts) -> Finding:
    """Report the versions of hvdtrain and Python."""
    version, python = facts.installation.packages["hvdtrain"], facts.machine.system["python"]
    return Finding("hvdtrain", "ok", f"{version or 'not installed'} on Python {python}")


def torch(facts: DoctorFacts) -> Finding:
    """Check that torch can be imported."""
    answer = facts.installation.torch
    if answer.error:
        return Finding("torch", "broken", answer.error, "torch cannot be imported", "pip install torch")
    values = answer.values
    cuda = f"CUDA {values['cuda']}" if values["cuda"] else "CPU only"
    return Finding("torch", "ok", f"{values['version']}, {cuda}, {values['threads']} threads per process")


def horovod(facts: DoctorFacts) -> Finding:
    """Check that Horovod is built for this torch and can be imported."""
    record, answer = facts.installation.record, facts.installation.horovod
    broken: Level = "warning" if facts.info.launcher == TORCHRUN else "broken"  # its engines need none
    if record is None:
        why = "a job of several ranks needs it; a single process, and engines under torchrun, do not"
        return Finding("horovod", "warning", "not installed", why, BUILD_COMMAND)
    if facts.installation.mismatch:
        why = " ".join(facts.installation.mismatch.split())
        return Finding("horovod", broken, record.version, why, BUILD_COMMAND)
    if answer.error:
        why, fix = _explain_import_error(answer.error)
        return Finding("horovod", broken, record.version, f"cannot be imported: {answer.error}{why}", fix)
    parts = ", ".join(name for key, name in _NAMES.items() if answer.values[key])
    target = f", built for {record.torch}" if record.torch else ""
    return Finding("horovod", "ok", f"{record.version} with {parts}{target}", _features(record))


def _explain_import_error(error: str) -> tuple[str, str]:
    if (missing := re.search(r"No module named '(\w+)", error)) and missing[1] in _UNDECLARED:
        package = "pyyaml" if missing[1] == "yaml" else missing[1]
        return "; Horovod does not declare this dependency", f"pip install {package}"
    for pattern, why, fix in _IMPORT_ERRORS:
        if re.search(pattern, error):
            return f"; {why}", fix
    return "", BUILD_COMMAND


def _features(record: BuildRecord) -> str:
    parts = {
        "its Timeline thread sleeps when idle": record.quiet,
        "its threads wake as soon as there is work": record.prompt,
        "its bugs with lost and joining ranks are fixed": record.fixed,
    }
    return ", ".join(text for text, applies in parts.items() if applies)


def stock_build(facts: DoctorFacts) -> Finding | None:
    """Report what a Horovod lacks that `hvdtrain build-horovod` of this version did not build."""
    record = facts.installation.record
    if record is None or facts.installation.horovod.error or (record.quiet and record.prompt and record.fixed):
        return None
    lacks = {
        "a thread of rank 0 keeps a core busy whenever the Timeline is enabled": not record.quiet,
        "its threads poll for work once per millisecond, and waiting threads keep a core busy": not record.prompt,
        "when a rank is lost or joins, other ranks may wait for a timeout, deadlock or crash": not record.fixed,
    }
    why = "; ".join(text for text, applies in lacks.items() if applies)
    return Finding("horovod_build", "warning", "not built by this version of hvdtrain", why, BUILD_COMMAND)


def untested_build(facts: DoctorFacts) -> Finding | None:
    """Report a Horovod that was not tested after it was installed."""
    record = facts.installation.record
    if record is None or record.tested:
        return None
    why = "two ranks have not summed a tensor with it yet"
    return Finding("horovod_test", "warning", "not run", why, f"inside a job: {PROVE_NOW}")


def distutils(facts: DoctorFacts) -> Finding | None:
    """Check that horovodrun finds distutils, which Python 3.12 removed."""
    installed = facts.installation
    if installed.record is None or installed.python < (3, 12) or installed.distutils:
        return None
    major, minor = installed.python
    why = "horovodrun and the build of Horovod import it; setuptools provides it"
    return Finding("distutils", "warning", f"missing in Python {major}.{minor}", why, "pip install setuptools")


def packages(facts: DoctorFacts) -> Finding:
    """Check that the packages of the default task are installed."""
    versions = facts.installation.packages
    found = ", ".join(f"{name} {versions[name] or 'not installed'}" for name in ("transformers", "numpy"))
    if versions["transformers"] is not None:
        return Finding("packages", "ok", found)
    return Finding("packages", "warning", found, "the task language_model needs it", "pip install 'hvdtrain[lm]'")


def torch_files(facts: DoctorFacts) -> Finding | None:
    """Warn of a torch with a ``torch.load(weights_only=True)`` that can execute code from the file."""
    version = re.match(r"(\d+)\.(\d+)", str(facts.installation.torch.values.get("version", "")))
    if version is None or (int(version[1]), int(version[2])) >= (2, 10):
        return None
    why = (
        "before version 2.10, torch.load(weights_only=True) can execute code from the file (CVE-2026-24747);"
        " hvdtrain loads no such files, but your task may"
    )
    fix = f"pip install 'torch>=2.10', then {BUILD_COMMAND}"
    return Finding("torch_load", "warning", f"torch {version[0]}", why, fix)
