"""What a run's options ask to be recorded of it, added to its recorder."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hvdtrain.comm.base import Comm, TimelineComm
from hvdtrain.comm.objects import broadcast_json
from hvdtrain.config.schema import ObserveConfig
from hvdtrain.config.windows import AUTO, Window, parse_window
from hvdtrain.errors import ConfigError
from hvdtrain.loading import load
from hvdtrain.observe.horovod_timeline import HorovodTimeline
from hvdtrain.observe.live_window import LiveWindow, Requests
from hvdtrain.observe.monitor import Monitor, MonitorThread, gpu_identity
from hvdtrain.observe.recorder import Recorder
from hvdtrain.observe.sinks import sink_maker
from hvdtrain.observe.span_trace import SpanTrace
from hvdtrain.observe.tensorboard import TensorBoard, is_installed
from hvdtrain.run_layout import RunLayout
from hvdtrain.runtime.threads import Spinner, find_spinner
from hvdtrain.runtime.timeline import ASK, TimelinePlan
from hvdtrain.spans import Spans
from hvdtrain.training.records.device_spans import DeviceSpans
from hvdtrain.training.records.profiler_ranges import NvtxRanges
from hvdtrain.training.records.torch_profile import TorchProfile

_FIRST_STEPS = 20
"""Steps of each start of a run whose spans are written under ``--observe.timeline auto``."""


def add_sinks(
    recorder: Recorder, observe: ObserveConfig, given: Sequence[Any], comm: Comm, folder: Path = Path()
) -> None:
    """On rank 0, feed the sinks that the options name, from `folder` on, and those that a program gave.

    Errors:
        ConfigError: one of them cannot be found or is no sink; on every rank.
    """
    wanted = "a function of one record, or a class with write(record) and close()"
    found = [(spec, load(spec, ConfigError, wanted, folder)) for spec in observe.sinks]
    found += [(getattr(value, "__name__", type(value).__name__), value) for value in given]
    for name, value in found:
        make = sink_maker(value)
        if comm.rank == 0:
            recorder.add_sink(make, name)


def add_tensorboard(
    recorder: Recorder, observe: ObserveConfig, directory: Path, device: torch.device, comm: Comm
) -> None:
    """On rank 0, feed TensorBoard."""
    if comm.rank != 0 or not observe.tensorboard:
        return
    if is_installed():
        layout = RunLayout(directory)
        make = partial(TensorBoard, layout.tensorboard, layout.journal, gpu=device.type == "cuda")
        recorder.add_sink(make, "TensorBoard")
    else:
        recorder.warn('nothing is written for TensorBoard, which is not installed: pip install "hvdtrain[tensorboard]"')


def add_monitor(recorder: Recorder, device: torch.device, comm: Comm) -> None:
    """On rank 0, watch the machine."""
    if comm.rank == 0:
        recorder.add_watcher(MonitorThread(Monitor(gpu_identity(device)).sample, recorder.event))


def add_horovod_timeline(
    recorder: Recorder, plan: TimelinePlan, directory: Path, comm: Comm, *, told: bool = False
) -> HorovodTimeline | None:
    """Record Horovod's Timeline where rank 0's plan says so, or say why not, unless that was told. Collective: yes."""
    first, last = broadcast_json(comm, [plan.window.first, plan.window.last], name="timeline")
    window = Window(first, last)
    if not window:
        if plan.reason and comm.size > 1 and not told:
            how = f"; to have it all the same: {ASK}" if plan.kind == "spans" else ""
            recorder.say(f"Horovod's Timeline: {plan}{how}")
        return None
    horovod = comm if comm.rank == 0 and isinstance(comm, TimelineComm) else None
    thread = find_spinner(horovod.started_threads) if horovod is not None and not plan.quiet else None
    writer = Spinner(thread) if thread is not None else None
    timeline = HorovodTimeline(comm, horovod, writer, window, RunLayout(directory).timeline.folder, recorder.warn)
    recorder.add_watcher(timeline)
    return timeline


def add_listeners(spans: Spans, observe: ObserveConfig, device: torch.device, stack: ExitStack) -> None:
    """Let `spans` see the device's own clock, garbage collections and Nsight Systems, until `stack` ends."""
    stack.enter_context(spans.collections())
    if device.type != "cuda":
        if observe.nvtx:
            raise ConfigError("--observe.nvtx true, but there is no CUDA device to be watched by Nsight Systems")
        return
    if observe.nvtx:
        spans.listeners.append(NvtxRanges())
    spans.listeners.append(DeviceSpans(spans))


def add_watchers(
    recorder: Recorder,
    observe: ObserveConfig,
    spans: Spans,
    directory: Path,
    comm: Comm,
    started_at: int,
    stop: int,
    horovod: HorovodTimeline | None = None,
    start: int = 0,
) -> LiveWindow:
    """Trace what the options ask for of the steps from `started_at` to `stop`: this rank's spans, torch's profile.

    `start` is the number of this start of the run.
    What is returned lets all of them, `horovod` included, record further steps while the run goes on.
    """
    folder = RunLayout(directory).timeline.folder
    if observe.timeline == AUTO:
        window = Window(started_at + 1, started_at + _FIRST_STEPS)
    else:
        window = parse_window(observe.timeline, "observe.timeline", AUTO)
    recordings: list[SpanTrace | HorovodTimeline] = [horovod] if horovod is not None else []
    lacks = "" if horovod is not None else "Horovod's Timeline (the run's first lines, or hvdtrain doctor, say why)"
    if observe.timeline != "off":
        trace = SpanTrace(spans, folder, comm.rank, socket.gethostname(), window, recorder.warn, start)
        recorder.add_watcher(trace)
        recordings.append(trace)
    else:
        lacks = "spans and Horovod's Timeline (--observe.timeline off)"
    profile = parse_window(observe.profile, "observe.profile")
    for option, asked in (("timeline", window), ("profile", profile)):
        if asked and started_at < stop < asked.first:
            recorder.warn(f"--observe.{option} begins at step {asked.first}, but the run ends at step {stop}")
    profiler = TorchProfile(spans, folder, comm.rank, profile, recorder.warn)
    recorder.add_watcher(profiler)
    requests = Requests(folder) if comm.rank == 0 else None
    live = LiveWindow(folder, requests, recordings, profiler, lacks, recorder.say)
    recorder.add_watcher(live)  # the last one: the others have written by its turn
    return live
