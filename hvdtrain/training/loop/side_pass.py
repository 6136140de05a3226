"""A forward and backward pass that leaves no trace in the training it stands in."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
from torch import nn

from hvdtrain.engine.base import Engine
from hvdtrain.training.loop.buffers import all_buffers, copied_to_host


@contextmanager
def untouched(model: nn.Module, engine: Engine, device: torch.device) -> Iterator[None]:
    """Between two steps: buffers, modes, random states and gradients come out as they went in, bit for bit.

    What a forward pass writes anywhere else (parameters, attributes of the user's own) is not undone.
    """
    modes = {module: module.training for module in model.modules()}
    buffers = copied_to_host(all_buffers(model))
    python, numpy = random.getstate(), np.random.get_state()
    engine.begin(0)  # clears gradients, as the next step's begin does, and lets backward start no exchange
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]  # of those the optimizer lacks
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        with torch.random.fork_rng([device] if device.type == "cuda" else []), _uncompiled():
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for copy in buffers:
            copy.put_back()
        random.setstate(python)
        np.random.set_state(numpy)
        for module, training in modes.items():
            module.training = training


def _uncompiled() -> AbstractContextManager[object]:
    """Hooks would make a compiled model compile again, and see nothing inside of it."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance
