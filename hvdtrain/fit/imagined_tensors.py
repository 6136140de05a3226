"""Imagine a job without its memory: fake tensors with a count of their bytes, DDP's copies, attention as on GPUs."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hvdtrain.comm.solo import Finished, ImaginedComm, Traffic, UnderWay

_BLOCK_BYTES = 512
"""CUDA's allocator rounds sizes up to a multiple of this."""


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages of tensors that exist, each once, while it is active.

    torch's own `MemTracker` is not used: its hooks on modules and optimizers do not see what engines replace.
    """

    assumed: float | None = None  # for numbers without a value; see `ImaginedTensors`

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0  # bytes of all live tensors
        self.peak = 0  # the largest sum so far
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sizes: dict[int, int] = {}

    def add(self, tensors: Iterable[object]) -> None:
        """Count these tensors, if they are not known."""
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                self._count(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count its results."""
        result = self._run(func, args, dict(kwargs or {}))
        self.add(tree_leaves(result))
        return result

    def _run(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return func(*args, **named)

    def __enter__(self) -> Any:
        """Begin. How FSDP frees and regains the memory of gathered parameters counts, too."""
        resize = torch.UntypedStorage.resize_

        def resize_counted(storage: torch.UntypedStorage, size: int) -> Any:
            resized = resize(storage, size)
            if (key := id(storage)) in self._known:
                self._set_size(key, storage.nbytes())
            return resized

        torch.UntypedStorage.resize_ = resize_counted  # type: ignore[assignment, method-assign]
        self._resize = resize
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        """End."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def _count(self, tensor: Tensor) -> None:
        # The storage of a divided tensor has no memory; that of its rows has.
        own: Tensor = getattr(tensor, "_local_tensor", tensor)
        storage = own.untyped_storage()
        key = id(storage)
        if (known := self._known.get(key)) is not None and known() is storage:
            self._set_size(key, storage.nbytes())  # Horovod resizes the empty result that it was given
            return

        def forget(_: object) -> None:
            self._set_size(key, 0)
            del self._known[key], self._sizes[key]

        self._known[key] = weakref.ref(storage, forget)
        self._set_size(key, storage.nbytes())

    def _set_size(self, key: int, size: int) -> None:
        rounded = -(-size // _BLOCK_BYTES) * _BLOCK_BYTES
        self.now += rounded - self._sizes.get(key, 0)
        self._sizes[key] = rounded
        self.peak = max(self.peak, self.now)


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

    def allreduce(self, tensor: Tensor, *, name: str) -> Finished:  # noqa: D102
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
        self._errors[self._name] = self._copy - self._tensor
        return super().wait()


class FusedAttention(TorchFunctionMode):
    """While it is active, `scaled_dot_product_attention` keeps its inputs, its result and a number for each query.

    That is what torch's flash, memory-efficient and cuDNN kernels keep. On a CPU, torch computes whole scores if keys
    and values have different sizes, as in DeepSeek's latent attention. Results have no values.

    torch's function is replaced, too: modes are not active where backward computes activations again.
    """

    def __enter__(self) -> FusedAttention:
        """Begin."""
        nn.functional.scaled_dot_product_attention = self._call
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """End."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        nn.functional.scaled_dot_product_attention = scaled_dot_product_attention

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        return self.__torch_function__(scaled_dot_product_attention, (), args, kwargs)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function of torch."""
        named = dict(kwargs or {})
        if func is not scaled_dot_product_attention:
            return func(*args, **named)
        given = [*args, *(named[name] for name in ("query", "key", "value")[len(args) :])][:3]
        if torch.is_autocast_enabled("cpu"):
            given = [tensor.to(torch.get_autocast_dtype("cpu")) for tensor in given]
        return _Attention.apply(*given)  # type: ignore[no-untyped-call]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return a tensor (..., queries, size of a value)."""
        result = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, result, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return a gradient for each input."""
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])
