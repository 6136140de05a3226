"""Profilers: spans as NVTX ranges for Nsight Systems, and torch.profiler over a window of steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hvdtrain.config.windows import OFF, Window
from hvdtrain.observe.span_trace import free_path
from hvdtrain.run_layout import TimelineLayout
from hvdtrain.spans import Listener, Spans


class NvtxRanges(Listener):
    """Opens an NVTX range of the same name around each span; Nsight Systems shows them next to the kernels."""

    def enter(self, name: str) -> None:
        """Open a range."""
        torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]

    def exit(self, name: str) -> None:
        """Close the innermost range."""
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


@dataclass
class TorchProfile(Listener):
    """Writes ``RUN/timeline/torch-steps-FIRST-LAST-rank-N.json``: operators and kernels, named by span.

    A failure costs the profile, not the training: it calls `warn`. `folder` is ``RUN/timeline``.
    """

    spans: Spans
    folder: Path
    rank: int
    window: Window
    warn: Callable[[str], None]
    _profile: Any = None
    _first: int = 0
    _open: list[Any] = field(default_factory=list)

    def begin_step(self, step: int) -> None:
        """Begin before the first step of the window, end after its last."""
        if self._profile is not None and step not in self.window:
            self._end(step - 1)
        elif self._profile is None and step in self.window:
            self._begin(step)

    def record(self, window: Window) -> None:
        """Profile another window, which begins later; a profile in progress ends with it."""
        self.window = window

    def enter(self, name: str) -> None:
        """Open a range of torch.profiler for a span."""
        opened = torch.profiler.record_function(name)
        opened.__enter__()  # type: ignore[no-untyped-call]
        self._open.append(opened)

    def exit(self, name: str) -> None:
        """Close the innermost range; ignore a span that began before the profile."""
        if self._open:
            self._open.pop().__exit__(None, None, None)

    def close(self) -> None:
        """End a profile in progress."""
        if self._profile is not None:
            self._end(self.spans.step)

    def _begin(self, step: int) -> None:
        self._first = step
        try:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            # acc_events: torch 2.11 warns without it, and there is one cycle.
            profile = torch.profiler.profile(activities=activities, record_shapes=True, acc_events=True)
            profile.start()
        except (RuntimeError, AssertionError) as error:
            self.warn(f"torch.profiler does not start: {error}; training continues")
            self.window = OFF
            return
        self._profile = profile
        self.spans.listeners.append(self)

    def _end(self, last: int) -> None:
        profile, self._profile = self._profile, None
        self.spans.listeners.remove(self)
        path = free_path(TimelineLayout(self.folder).torch_profile(self._first, last, self.rank))
        try:
            profile.stop()
            self.folder.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            self.warn(f"cannot write the profile {path}: {error}; training continues")
