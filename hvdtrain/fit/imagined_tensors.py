"""What is imagined of a job: tensors without memory, with a count of their bytes; ranks with the memory of DDP."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from hvdtrain.comm.imagined import ImaginedComm, Traffic, UnderWay
from hvdtrain.comm.solo import Finished
from hvdtrain.fit.live_bytes import LiveBytes

_READ = torch.ops.aten._local_scalar_dense.default
_GROUPED = torch.ops.aten._grouped_mm.default
_COLLECTIVES = ("c10d", "_c10d_functional")
"""Namespaces of torch's collectives."""


class ImaginedTensors(LiveBytes):  # type: ignore[no-untyped-call]
    """While it is active, new tensors of floating-point numbers, and of bytes, are torch's fake tensors.

    Compressions send bytes. What is computed from a fake tensor is fake. Tensors of integers that depend on none, such
    as token ids, positions and sizes of parts, have values: models and engines read them.

    Attributes:
        assumed: what numbers of fake tensors are read as; None to refuse, as the model's steps may depend on them.
        traffic: counts the bytes in collectives of torch, which do nothing.
        waits_for_torch: whether these are of activations.
    """

    def __init__(self, traffic: Traffic | None = None, *, waits_for_torch: bool = False) -> None:
        super().__init__()
        self.traffic, self.waits_for_torch = Traffic() if traffic is None else traffic, waits_for_torch
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def imagine(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Replace parameters and floating-point buffers of a model, and those of its optimizer, by fake ones."""
        fakes: dict[Tensor, nn.Parameter] = {
            parameter: nn.Parameter(self._like(parameter), parameter.requires_grad) for parameter in model.parameters()
        }
        for module in model.modules():
            for name, own in module._parameters.items():
                module._parameters[name] = own if own is None else fakes[own]
            for buffer_name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    module._buffers[buffer_name] = self._like(buffer)
        state, optimizer.state = optimizer.state, defaultdict(dict)
        for group in optimizer.param_groups:
            group["params"] = [fakes.get(parameter, parameter) for parameter in group["params"]]
        for owner, slots in state.items():
            optimizer.state[fakes[owner]] = {
                name: self._like(slot) if isinstance(slot, Tensor) else slot for name, slot in slots.items()
            }

    def _like(self, tensor: Tensor) -> Tensor:
        with self._fake:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)

    def _run(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        given = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, Tensor)]
        if func.namespace in _COLLECTIVES and given:
            self._count_traffic(func.overloadpacket.__name__, max(tensor.nbytes for tensor in given))
        is_fake = any(isinstance(tensor, FakeTensor) for tensor in given)
        if is_fake and func is _READ and self.assumed is not None:
            return self.assumed
        if not is_fake and (given or not _makes_floats(func, args, named)):
            return func(*args, **named)
        with self._fake:
            return _grouped(func, args, named) if func is _GROUPED else func(*args, **named)

    def _count_traffic(self, name: str, nbytes: int) -> None:
        if "wait" in name or "barrier" in name:
            return
        sent = 2 * nbytes if "allreduce" in name or "all_reduce" in name else nbytes
        self.traffic.sent += sent if "recv" not in name else 0
        if (self.waits_for_torch and name != "send") or "alltoall" in name or "all_to_all" in name:
            self.traffic.waited_for += sent


def _makes_floats(func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    """Return whether an operation without tensors makes one of floating-point numbers."""
    dtype = named.get("dtype")
    if dtype is not None:
        return bool(dtype.is_floating_point or dtype == torch.uint8)
    numbers = [value for value in args if isinstance(value, (int, float))]
    if "arange" in func.name() or "full" in func.name() or "scalar_tensor" in func.name():
        return any(isinstance(number, float) for number in numbers)
    return True


def _grouped(func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """Multiply groups of matrices: torch's shape function accepts bf16 only."""
    left, right, *rest = args
    if left.dtype == torch.bfloat16:
        return func(*args, **named)
    return func(left.to(torch.bfloat16), right.to(torch.bfloat16), *rest, **named).to(left.dtype)


class ImaginedDdp(ImaginedComm):
    """Ranks to which an uncompressed exchange sends as the hooks of `DdpSums` send, with the memory that it takes.

    DDP itself does not run: its exchange is not in Python. Its buckets hold the gradients, as ours do.
    `compression` is the name of one of the engine's.
    """

    def __init__(self, size: int, compression: str) -> None:
        super().__init__(size)
        self._dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(compression)
        self._errors: dict[str, Tensor] | None = {} if compression == "powersgd" else None

    def allreduce(self, tensor: Tensor, *, name: str) -> Finished:
        """Return `tensor`."""
        done = super().allreduce(tensor, name=name)
        if not tensor.is_floating_point():
            return done
        if self._errors is None:
            return _Sent(tensor, tensor if self._dtype is None else tensor.to(self._dtype))
        return _Approximated(tensor, self._errors, name)


class _Sent(UnderWay):
    """Holds what is sent until all gradients have arrived."""

    def __init__(self, tensor: Tensor, sent: Tensor) -> None:
        super().__init__(tensor)
        self._sent = sent


class _Approximated(UnderWay):
    """Holds a copy for PowerSGD, and keeps the error. The matrices that are sent are small."""

    def __init__(self, tensor: Tensor, errors: dict[str, Tensor], name: str) -> None:
        super().__init__(tensor)
        self._tensor, self._errors, self._name = tensor, errors, name
        self._errors.setdefault(name, torch.zeros_like(tensor))
        self._copy = tensor.clone()

    def wait(self) -> Tensor:
        """Return the tensor."""
        self._errors[self._name] = self._copy - self._tensor
        return super().wait()
