"""Number formats of forward and backward: autocast, and loss scaling for fp16."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """How forward and backward compute.

    Args:
        name: fp32, bf16 or fp16.
        device: of the model.

    Attributes:
        scaler: torch's GradScaler; passes values through where the format is not fp16.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._dtype = _AUTOCAST.get(name)
        self._device_type = device.type
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")

    def autocast(self) -> AbstractContextManager[object]:
        """The context of a forward pass."""
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self._device_type, dtype=self._dtype)
