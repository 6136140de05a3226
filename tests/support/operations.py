"""Count a compressor's operations: on a GPU each is a kernel or more."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from hvdtrain.compression.base import BucketShape, commit_all
from hvdtrain.compression.table import Compression
from tests.support.compression import drive, gradients
from tests.support.thread_comm import on_ranks


class _Count(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return function(*args, **(kwargs or {}))


class _Uncounted:
    """A communicator, or a handle of it, whose own operations do not count."""

    def __init__(self, counted: Any) -> None:
        self._counted = counted

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._counted, name)
        if not callable(found):
            return found

        def call(*arguments: Any, **options: Any) -> Any:
            with _disable_current_modes():
                result = found(*arguments, **options)
            return _Uncounted(result) if hasattr(result, "wait") else result

        return call


def operations(compression: Compression, shape: BucketShape, size: int) -> int:
    """Return how many operations one rank of `size` runs to pack, exchange and commit a bucket."""

    def body(comm: Any) -> int:
        compressor = compression.load()(shape, _Uncounted(comm))
        values = gradients(shape, comm.rank)
        with _Count() as count:
            for index, value in enumerate(values):
                compressor.pack(index, value, 0.5)
            drive(compressor, shape.zeros())
            commit_all([compressor], applied=True)
        return count.calls

    return on_ranks(size, body)[0]
