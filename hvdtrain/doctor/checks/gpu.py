"""Whether torch and Horovod can use the GPUs."""

from __future__ import annotations

from hvdtrain.doctor.facts import DoctorFacts
from hvdtrain.doctor.finding import Finding, Level
from hvdtrain.install.record import BUILD_COMMAND
from hvdtrain.runtime.environment import TORCHRUN

_BF16_SINCE = (8, 0)
_DRIVER_OF_CUDA = {11: "450.80", 12: "525.60", 13: "580.65"}
"""The oldest Linux driver for each major version of CUDA, from the release notes of the CUDA Toolkit."""


def gpus(facts: DoctorFacts) -> Finding:
    """Compare the GPUs that torch can use with those of the machine."""
    torch, machine = facts.installation.torch, facts.gpu
    names: list[str] = list(torch.values.get("gpus", []))
    if names or torch.error or not machine.count:
        text = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        return Finding("gpus", "ok", text or "none")
    if not torch.values.get("cuda"):
        why, fix = (
            "this torch is built for the CPU only",
            f"install a torch with CUDA, then: {BUILD_COMMAND} --gpu nccl",
        )
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
    fix = "sudo modprobe nvidia_peermem; to verify, run with NCCL_DEBUG=INFO, then: hvdtrain doctor --nccl_log FILE"
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
