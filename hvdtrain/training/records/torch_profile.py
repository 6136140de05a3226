"""`torch.profiler` over a window of steps, a file a rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hvdtrain.config.windows import OFF, Window
from hvdtrain.observe.trace_file import free_path
from hvdtrain.run_layout import TimelineLayout
from hvdtrain.spans import Spans
from hvdtrain.training.records.profiler_ranges import TorchRanges


class TorchProfile:
    """Writes ``RUN/timeline/torch-steps-FIRST-LAST-rank-N.json``: operators and kernels, under the names of the spans.

    What fails costs the profile, not the training.

    Args:
        spans: of this rank; their names stand in the profile.
        folder: ``RUN/timeline``.
        rank: stands in the file's name.
        window: the steps to profile.
        warn: told when it fails.
    """

    def __init__(self, spans: Spans, folder: Path, rank: int, window: Window, warn: Callable[[str], None]) -> None:
        self._spans = spans
        self._folder = folder
        self._rank = rank
        self._window = window
        self._warn = warn
        self._profile: Any = None
        self._first = 0
        self._ranges = TorchRanges()

    def begin_step(self, step: int) -> None:
        """Begin before the first step of the window, end after its last."""
        if self._profile is not None and step not in self._window:
            self._end(step - 1)
        elif self._profile is None and step in self._window:
            self._begin(step)

    def record(self, window: Window) -> None:
        """Profile these steps, the first of which is yet to come, or end with them a profile under way."""
        self._window = window

    def close(self) -> None:
        """End a profile under way."""
        if self._profile is not None:
            self._end(self._spans.step)

    def _begin(self, step: int) -> None:
        self._first = step
        try:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            profile = torch.profiler.profile(activities=activities, record_shapes=True)
            profile.start()
        except (RuntimeError, AssertionError) as error:
            self._warn(f"torch.profiler does not start: {error}; training goes on")
            self._window = OFF
            return
        self._profile = profile
        self._spans.listeners.append(self._ranges)

    def _end(self, last: int) -> None:
        profile, self._profile = self._profile, None
        self._spans.listeners.remove(self._ranges)
        path = free_path(TimelineLayout(self._folder).torch_profile(self._first, last, self._rank))
        try:
            profile.stop()
            self._folder.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            self._warn(f"the profile {path} is not written: {error}; training goes on")
