"""How much a run computes: FLOPs of a sample, and what its devices could do at most."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from hvdtrain.config.schema import Config
from hvdtrain.observe.flops import FlopCount, peak_tflops

_BACKWARD = 2
"""Backward computes the gradients of inputs and of weights: twice what forward does."""


class FirstPass:
    """Counts the first forward pass it is put around, in training, on the way: no pass more is run.

    Args:
        config: precision, samples of a pass, and the peak where the user has said it.
        device: of this rank.
        size: number of ranks.
        tell: takes the event ``flops``, once: ``per_sample``, FLOPs of training on a sample; ``device``;
            ``peak_per_s`` of all ranks together and ``peak_source``, None where that is not known. It is not called
            where nothing could be counted.
    """

    def __init__(self, config: Config, device: torch.device, size: int, tell: Callable[[dict[str, Any]], None]) -> None:
        self._config = config
        self._device = device
        self._size = size
        self._tell = tell
        self._is_counted = False

    def __call__(self) -> AbstractContextManager[object]:
        """What a forward pass is to be run in."""
        return nullcontext() if self._is_counted else self._counted()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._is_counted = True
        with FlopCount() as count:
            yield
        if count.flops:
            self._tell(self._event(count.flops))

    def _event(self, flops: int) -> dict[str, Any]:
        device, config = self._device, self._config
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        own = config.observe.peak_tflops
        tf32 = torch.get_float32_matmul_precision() != "highest"
        known = (own, "--observe.peak_tflops") if own else peak_tflops(name, config.precision, tf32=tf32)
        return {
            "event": "flops",
            "per_sample": (1 + _BACKWARD) * flops / config.train.micro_batch,
            "device": name,
            "peak_per_s": known[0] * 1e12 * self._size if known else None,
            "peak_source": known[1] if known else None,
        }
