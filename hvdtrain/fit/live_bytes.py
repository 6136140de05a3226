"""Count the bytes of live tensors."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
