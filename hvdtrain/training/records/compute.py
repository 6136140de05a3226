"""FLOPs of a sample, and the peak FLOP/s of the devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from hvdtrain.config.schema import Config
from hvdtrain.observe.flops import FlopCount, peak_tflops
from hvdtrain.training.loop.step_part import StepPart
from hvdtrain.training.start.device import allows_tf32

_BACKWARD = 2  # backward costs twice as much as forward: it computes gradients of inputs and of weights


@dataclass
class FirstPass(StepPart):
    """Counts the FLOPs of the first forward pass in training, without an extra pass.

    `event`: records the event ``flops``, once: ``per_sample``, FLOPs of training on a sample; ``device``;
    ``peak_per_s`` of all ranks together and ``peak_source``, None if unknown. It is not called if nothing could be
    counted.
    """

    config: Config  # precision, samples of a pass, and the peak if the user gives it
    device: torch.device  # of this rank
    size: int  # number of ranks
    event: Callable[[dict[str, Any]], None]
    same_samples: int  # number of ranks that have the same samples
    _is_counted: bool = field(default=False, init=False)

    def around_forward(self, batch: Any) -> AbstractContextManager[object] | None:
        """Return the context of a forward pass."""
        return None if self._is_counted else self._counted()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._is_counted = True
        with FlopCount() as count:
            yield
        if not count.flops:
            return
        device, config = self.device, self.config
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        own = config.observe.peak_tflops
        precision = config.precision.removesuffix("-weights")
        peak = (own, "--observe.peak_tflops") if own else peak_tflops(name, precision, tf32=allows_tf32())
        facts = {
            "per_sample": (1 + _BACKWARD) * count.flops * self.same_samples / config.train.micro_batch,
            "device": name,
            "peak_per_s": peak[0] * 1e12 * self.size if peak else None,
            "peak_source": peak[1] if peak else None,
        }
        self.event({"event": "flops", **facts})
