"""Spans as named ranges of a profiler: NVTX for Nsight Systems, torch's own for torch.profiler."""

from __future__ import annotations

from typing import Any

import torch


class NvtxRanges:
    """Opens an NVTX range of the same name around each span: what Nsight Systems shows beside the kernels."""

    def enter(self, name: str) -> None:
        """A span begins."""
        torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]

    def exit(self, name: str) -> None:
        """The innermost span ends."""
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    def take(self) -> dict[str, float]:
        """Nothing: it does not time."""
        return {}


class TorchRanges:
    """Opens a range of torch.profiler around each span."""

    def __init__(self) -> None:
        self._open: list[Any] = []

    def enter(self, name: str) -> None:
        """A span begins."""
        opened = torch.profiler.record_function(name)
        opened.__enter__()  # type: ignore[no-untyped-call]
        self._open.append(opened)

    def exit(self, name: str) -> None:
        """The innermost span ends; one that began before this listener came is passed over."""
        if self._open:
            self._open.pop().__exit__(None, None, None)

    def take(self) -> dict[str, float]:
        """Nothing: it does not time."""
        return {}
