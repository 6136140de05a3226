"""Checks of the packages in this Python environment, and whether torch and Horovod can use the GPUs."""

from __future__ import annotations

import re

from hvdtrain.doctor.facts import DoctorFacts
from hvdtrain.doctor.report import Finding, Level, known_cause
from hvdtrain.install.record import BUILD_COMMAND, PROVE_NOW, BuildRecord
from hvdtrain.runtime.environment import TORCHRUN

_NAMES = {"mpi": "MPI", "gloo": "Gloo", "nccl": "NCCL", "cuda": "CUDA"}
_UNDECLARED = ("cloudpickle", "psutil", "yaml", "cffi", "packaging")

_BF16_SINCE = (8, 0)
_DRIVER_OF_CUDA = {11: "450.80", 12: "525.60", 13: "580.65"}
"""The oldest Linux driver for each major version of CUDA, from the release notes of the CUDA Toolkit."""


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
    why, fix = known_cause("horovod", error)
    return (f"; {why}", fix.format(build=BUILD_COMMAND)) if why else ("", BUILD_COMMAND)


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


def gpus(facts: DoctorFacts) -> Finding:
    """Compare the GPUs that torch can use with those of the machine."""
    torch, machine = facts.installation.torch, facts.gpu
    names: list[str] = list(torch.values.get("gpus", []))
    if names or torch.error or not machine.count:
        text = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        return Finding("gpus", "ok", text or "none")
    if not torch.values.get("cuda"):
        why = "this torch is built for the CPU only"
        fix = f"install a torch with CUDA, then: {BUILD_COMMAND} --gpu nccl"
    elif facts.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        why, fix = "CUDA_VISIBLE_DEVICES hides them", "unset CUDA_VISIBLE_DEVICES"
    else:
        messages = "; ".join(torch.values.get("driver_warnings", []))
        why = "torch sees none" + (f": {messages}" if messages else "")
        fix = "compare the driver's version (nvidia-smi) with the one that this torch needs"
    return Finding("gpus", "warning", "none", f"the machine has {machine.count}, but {why}", fix)


def driver(facts: DoctorFacts) -> Finding | None:
    """Compare the driver with the CUDA version of torch."""
    machine, cuda = facts.gpu, facts.installation.torch.values.get("cuda")
    if not cuda or not machine.count:
        return None
    needed = int(str(cuda).split(".")[0])
    oldest = _DRIVER_OF_CUDA.get(needed)
    fix = f"install driver {oldest} or newer" if oldest else "install the newest driver"
    if machine.driver is None:
        why = f"the machine has {machine.count} GPUs, but no NVIDIA driver is loaded: torch uses the CPU"
        return Finding("driver", "broken", "none", why, f"{fix}; then: nvidia-smi")
    if machine.driver_cuda is None:
        why = "the driver's library libcuda.so.1 is missing: torch uses the CPU"
        return Finding("driver", "broken", machine.driver, why, "start the container with: docker run --gpus all")
    found = f"{machine.driver}, for CUDA {machine.driver_cuda[0]}.{machine.driver_cuda[1]}"
    if machine.driver_cuda[0] < needed:
        why = f"torch needs CUDA {cuda}, but a driver supports no newer major version than its own"
        fix += f"; or install a torch for CUDA {machine.driver_cuda[0]}, then: {BUILD_COMMAND}"
        return Finding("driver", "broken", found, why, fix)
    return Finding("driver", "ok", found)


def nccl(facts: DoctorFacts) -> Finding | None:
    """Check that Horovod can exchange GPU tensors with NCCL."""
    installed = facts.installation
    gpus, values = installed.torch.values.get("gpus"), installed.horovod.values
    if not installed.torch.values.get("cuda") or installed.horovod.error or not (gpus or values.get("cuda") is False):
        return None
    if values.get("nccl"):
        version = installed.record.nccl if installed.record else None
        return Finding("nccl", "ok", f"built in ({version})" if version else "built in")
    level: Level = "warning"
    why = "GPU gradients are copied through CPU memory, which is slow"
    if not values.get("cuda"):
        level = "broken" if gpus and facts.info.launcher != TORCHRUN else "warning"  # its engines need no Horovod
        why = "Horovod was built without CUDA: it cannot sum GPU tensors, and a job on GPUs fails"
    return Finding("nccl", level, "not built in", why, f"{BUILD_COMMAND} --gpu nccl")


def nccl_library(facts: DoctorFacts) -> Finding | None:
    """Check that the NCCL that Horovod was built with still exists and matches the one of torch."""
    installed = facts.installation
    if installed.nccl is None:
        return None
    if installed.nccl.path is None and not installed.horovod.values.get("libnccl"):
        places = ", ".join(map(str, installed.nccl.folders)) or "the system's folders"
        why = f"Horovod looks for it in {places}: the folder of HOROVOD_NCCL_HOME must not be removed after the build"
        fix = f"{BUILD_COMMAND} --gpu nccl, which uses the NCCL of torch"
        return Finding("libnccl", "broken", f"{installed.nccl.soname} is not found", why, fix)
    built, now = installed.record.nccl if installed.record else None, installed.torch.values.get("nccl")
    if built and now and built.split(".")[:2] != str(now).split(".")[:2]:
        why = f"Horovod was built with NCCL {built}; a process loads only one of them, which may lack newer functions"
        return Finding("libnccl", "warning", f"torch has NCCL {now}", why, f"{BUILD_COMMAND} --gpu nccl")
    return Finding("libnccl", "ok", str(installed.horovod.values.get("libnccl") or installed.nccl.path), minor=True)


def pinned_memory(facts: DoctorFacts) -> Finding | None:
    """Check that host memory can be pinned, so that copies to the GPU are asynchronous."""
    if not facts.installation.torch.values.get("gpus"):
        return None
    if error := facts.installation.torch.values.get("pinned"):
        why = f"pinning 64 MiB failed ({error}): training waits while batches are copied to the GPU"
        return Finding("pinned_memory", "warning", "none", why, "ulimit -l unlimited; docker run --ulimit memlock=-1")
    return Finding("pinned_memory", "ok", "64 MiB can be pinned", minor=True)


def gpu_direct(facts: DoctorFacts) -> Finding | None:
    """Check whether network cards can access GPU memory directly."""
    if not facts.installation.torch.values.get("gpus") or not facts.network.rdma:
        return None
    if facts.gpu.peer_memory:
        copy = "" if facts.gpu.gdrcopy else ", without GDRCopy (small messages take longer)"
        return Finding("gpudirect", "ok", f"nvidia_peermem is loaded{copy}")
    why = "without it, or DMA-BUF with the open driver, gradients between hosts are copied through host memory"
    fix = "sudo modprobe nvidia_peermem; to verify: NCCL_DEBUG=INFO, then hvdtrain timeline report RUN --log FILE"
    return Finding("gpudirect", "warning", "nvidia_peermem is not loaded", why, fix)


def half_routes(facts: DoctorFacts) -> Finding | None:
    """Report how bf16 and fp16 are computed here, and how their gradients are exchanged."""
    values, flags = facts.installation.torch.values, facts.machine.cpu_flags
    if facts.installation.torch.error:
        return None
    exchange = "hvdtrain exchanges bf16 gradients itself, because Horovod does not support bfloat16"
    if values.get("gpus"):
        if tuple(values.get("capability", _BF16_SINCE)) < _BF16_SINCE:
            why = "GPUs with compute capability below 8.0 emulate bf16, which is slower than fp32"
            return Finding("half", "warning", "this GPU has no bf16", why, "--precision fp16 or --precision fp32")
        return Finding("half", "ok", f"bf16 and fp16 on the GPU; {exchange}", minor=True)
    fast = sorted(flags & {"avx512_bf16", "amx_bf16", "avx512_fp16", "amx_fp16", "bf16", "fphp"})
    text = f"this processor has {', '.join(fast)}" if fast else "this processor computes bf16 and fp16 as fp32"
    return Finding("half", "ok", f"{text}; {exchange}", minor=True)
