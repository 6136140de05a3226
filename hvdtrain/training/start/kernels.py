"""torch's switches of the process: which kernels it may choose."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hvdtrain.runtime.environment import change_variables

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def use_deterministic_kernels(variables: Mapping[str, str]) -> None:
    """Have torch use deterministic kernels only, and refuse operations that have none.

    Call it before CUDA starts: cuBLAS reads its variable then. `variables` is the environment of this process; a
    workspace that is set there is kept. torch also fills new memory that it does not write, and Inductor does not
    choose kernels by measuring them.
    """
    change_variables({_WORKSPACE: variables.get(_WORKSPACE, ":4096:8")})
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False  # it would measure convolutions, and choose others in each process


def set_tf32(choice: str, device: torch.device) -> None:
    """Allow or forbid TF32 in matrix products, convolutions and recurrent modules; auto changes nothing.

    On CPUs nothing changes: there, the same switch of torch would let some of them round matrix products.

    The newer `fp32_precision` of torch is not used: after it, torch raises an error where its own compiler reads the
    older switches. These set the newer ones, too.
    """
    if choice == "auto" or device.type != "cuda":
        return
    torch.set_float32_matmul_precision("high" if choice == "on" else "highest")
    torch.backends.cudnn.allow_tf32 = choice == "on"


def allows_tf32() -> bool:
    """Return whether matrix products may use TF32, by whichever of torch's switches."""
    products = torch.backends.cuda.matmul
    newer = getattr(products, "fp32_precision", None)  # since torch 2.9; then the older one may raise an error
    return bool(products.allow_tf32) if newer is None else newer == "tf32"
