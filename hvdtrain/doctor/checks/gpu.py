"""Whether torch and Horovod can use the GPUs."""

from __future__ import annotations

from hvdtrain.doctor.finding import Finding
from hvdtrain.doctor.gather import Gathered
from hvdtrain.install.record import BUILD_COMMAND


def gpus(facts: Gathered) -> Finding:
    """Count the GPUs that torch can use."""
    torch = facts.installation.torch
    names: list[str] = list(torch.values.get("gpus", []))
    if facts.machine.host.gpus and not names and not torch.error:
        why = f"{facts.machine.host.gpus} are there, torch sees none"
        return Finding("gpus", "warning", "none", why, "nvidia-smi shows the driver's version; torch may need a newer")
    return Finding("gpus", "ok", ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none")


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
