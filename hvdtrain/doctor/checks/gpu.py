"""Whether torch and Horovod can use the GPUs."""

from __future__ import annotations

from hvdtrain.doctor.facts import Gathered
from hvdtrain.doctor.finding import Finding
from hvdtrain.install.record import BUILD_COMMAND

_BF16_SINCE = (8, 0)
_DRIVER_OF_CUDA = {11: "450.80", 12: "525.60", 13: "580.65"}
"""The oldest driver for Linux with which each major version of CUDA runs, as the CUDA Toolkit's release notes say."""


def gpus(facts: Gathered) -> Finding:
    """Count the GPUs that torch can use."""
    torch, there = facts.installation.torch, facts.gpu
    names: list[str] = list(torch.values.get("gpus", []))
    if names or torch.error:
        text = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        return Finding("gpus", "ok", text or "none")
    count = max(there.devices, there.on_bus)
    if not count:
        return Finding("gpus", "ok", "none")
    if not torch.values.get("cuda"):
        mend = f"pip install torch with CUDA, then: {BUILD_COMMAND} --gpu nccl"
        return Finding("gpus", "warning", "none", f"{count} are there, and this torch is built for the CPU only", mend)
    if facts.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        why = f"{count} are there, and CUDA_VISIBLE_DEVICES hides them"
        return Finding("gpus", "warning", "none", why, "unset CUDA_VISIBLE_DEVICES")
    told = "; ".join(torch.values.get("told", []))
    why = f"{count} are there, torch sees none" + (f": {told}" if told else "")
    return Finding("gpus", "warning", "none", why, "nvidia-smi shows the driver's version; torch may need a newer")


def driver(facts: Gathered) -> Finding | None:
    """Compare the driver with the CUDA that torch was built with."""
    there, cuda = facts.gpu, facts.installation.torch.values.get("cuda")
    if not cuda or not (there.devices or there.on_bus):
        return None
    needed = int(str(cuda).split(".")[0])
    oldest = _DRIVER_OF_CUDA.get(needed)
    mend = f"install a driver of version {oldest} or newer" if oldest else "install the newest driver"
    if there.driver is None:
        why = f"{max(there.devices, there.on_bus)} GPUs are there, and no driver of NVIDIA's is loaded"
        return Finding("driver", "broken", "none", f"{why}: torch uses the CPU", f"{mend}; then: nvidia-smi")
    if there.driver_cuda is None:
        why = "its library libcuda.so.1 is not found: torch uses the CPU"
        return Finding("driver", "broken", there.driver, why, "start the container with: docker run --gpus all")
    found = f"{there.driver}, for CUDA {there.driver_cuda[0]}.{there.driver_cuda[1]}"
    if there.driver_cuda[0] < needed:
        why = f"too old: torch is built with CUDA {cuda}, and a driver serves no newer major version than its own"
        mend += f"; or: pip install a torch for CUDA {there.driver_cuda[0]}, then: {BUILD_COMMAND}"
        return Finding("driver", "broken", found, why, mend)
    return Finding("driver", "ok", found)


def nccl(facts: Gathered) -> Finding | None:
    """See that GPU tensors need not go by the CPU."""
    installed = facts.installation
    if not installed.torch.values.get("gpus") or installed.horovod.error:
        return None
    if installed.horovod.values.get("nccl"):
        version = installed.record.nccl if installed.record else None
        return Finding("nccl", "ok", f"built in ({version})" if version else "built in")
    mend = f"{BUILD_COMMAND} --gpu nccl"
    return Finding("nccl", "warning", "not built in", "gradients of GPUs go by the CPU, which is slow", mend)


def nccl_library(facts: Gathered) -> Finding | None:
    """See that the NCCL which Horovod was built with is still there, and is the one of torch."""
    installed = facts.installation
    if installed.nccl is None:
        return None
    if installed.nccl.path is None and not installed.horovod.values.get("libnccl"):
        places = ", ".join(map(str, installed.nccl.folders)) or "the system's folders"
        why = f"Horovod was built to look for it in {places}: the folder that HOROVOD_NCCL_HOME named has to last"
        mend = f"{BUILD_COMMAND} --gpu nccl, which uses the NCCL beside torch"
        return Finding("libnccl", "broken", f"{installed.nccl.soname} is not found", why, mend)
    built, now = installed.record.nccl if installed.record else None, installed.torch.values.get("nccl")
    if built and now and built.split(".")[:2] != str(now).split(".")[:2]:
        why = (
            f"Horovod was built with NCCL {built}; in one process one of the two serves both, and may lack what is new"
        )
        return Finding("libnccl", "warning", f"torch brings NCCL {now}", why, f"{BUILD_COMMAND} --gpu nccl")
    return Finding("libnccl", "ok", str(installed.horovod.values.get("libnccl") or installed.nccl.path), minor=True)


def pinned_memory(facts: Gathered) -> Finding | None:
    """See that memory can be pinned, from which a GPU copies by itself."""
    if not facts.installation.torch.values.get("gpus"):
        return None
    if error := facts.installation.torch.values.get("pinned"):
        why = f"64 MiB cannot be pinned ({error}): batches are copied to the GPU while training waits"
        return Finding("pinned_memory", "warning", "none", why, "ulimit -l unlimited; docker run --ulimit memlock=-1")
    return Finding("pinned_memory", "ok", "64 MiB can be pinned", minor=True)


def gpu_direct(facts: Gathered) -> Finding | None:
    """See whether network cards can reach GPU memory without the host's."""
    if not facts.installation.torch.values.get("gpus") or not facts.network.rdma:
        return None
    if facts.gpu.peer_memory:
        copy = "" if facts.gpu.gdrcopy else ", without GDRCopy (small messages take longer)"
        return Finding("gpudirect", "ok", f"nvidia_peermem is loaded{copy}")
    why = "without it, or DMA-BUF with the open driver, gradients between hosts are copied by the host's memory"
    mend = "sudo modprobe nvidia_peermem; then see with NCCL_DEBUG=INFO: hvdtrain doctor --nccl_log FILE"
    return Finding("gpudirect", "warning", "nvidia_peermem is not loaded", why, mend)


def half_routes(facts: Gathered) -> Finding | None:
    """Say how bf16 and fp16 are computed here, and how they travel."""
    values, flags = facts.installation.torch.values, facts.machine.cpu_flags
    if facts.installation.torch.error:
        return None
    travel = "bf16 gradients travel by a route of our own (Horovod knows no bfloat16)"
    if values.get("gpus"):
        if tuple(values.get("capability", _BF16_SINCE)) < _BF16_SINCE:
            why = "a GPU of compute capability below 8.0 emulates it, slower than fp32"
            return Finding("half", "warning", "no bf16 on this GPU", why, "--precision fp16, or fp32")
        return Finding("half", "ok", f"bf16 and fp16 on the GPU; {travel}", minor=True)
    fast = sorted(flags & {"avx512_bf16", "amx_bf16", "avx512_fp16", "amx_fp16", "bf16", "fphp"})
    text = f"this processor has {', '.join(fast)}" if fast else "this processor computes bf16 and fp16 as fp32"
    return Finding("half", "ok", f"{text}; {travel}", minor=True)
