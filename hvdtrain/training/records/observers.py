"""Observers that a run's options ask for, added to its recorder and its spans."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from typing import Any

import msgspec
import torch

from hvdtrain.comm.base import TimelineComm
from hvdtrain.comm.link_probe import probe_link
from hvdtrain.comm.objects import allgather_json, broadcast_json, on_rank_0
from hvdtrain.config.schema import ObserveConfig
from hvdtrain.config.windows import AUTO, Window, parse_window
from hvdtrain.errors import ConfigError
from hvdtrain.loading import load
from hvdtrain.observe.clocks import AT_START, Clocks
from hvdtrain.observe.horovod_timeline import HorovodTimeline
from hvdtrain.observe.host_load import ASIDE, HostLoad
from hvdtrain.observe.monitor import Monitor, MonitorThread, gpu_identity
from hvdtrain.observe.sinks import Background, sink_maker
from hvdtrain.observe.span_trace import SpanTrace
from hvdtrain.observe.stamps import StepFile, starts_so_far
from hvdtrain.observe.step_format import VERSION, StartLine
from hvdtrain.observe.step_stamps import StepStamps
from hvdtrain.observe.tensorboard import TensorBoard, is_installed
from hvdtrain.observe.trackers import TRACKERS, Tracker, check_installed
from hvdtrain.runtime.clock import clock_id
from hvdtrain.runtime.environment import rank_label
from hvdtrain.runtime.tuning import ASK, TimelinePlan
from hvdtrain.spans import Spans
from hvdtrain.task.base import import_library
from hvdtrain.training.records.listeners import DeviceSpans, NvtxRanges, TorchProfile
from hvdtrain.training.records.promise import Promise
from hvdtrain.training.records.verdict_watch import VerdictWatch
from hvdtrain.training.round import Round

_FIRST_STEPS = 20  # steps of each start with written spans, under ``--observe.timeline auto``

_LINK_S, _NETWORK_S = 0.08, 0.5  # time limit for measuring the link at each start, in seconds


def add_job_observers(current: Round, plan: TimelinePlan, sinks: Sequence[Any]) -> None:
    """Add what needs no model: sinks, TensorBoard, the machine's monitor, Horovod's Timeline. Collective: yes.

    Only a new recorder gets sinks; one of an earlier round has them. Horovod's Timeline is recorded if rank 0's plan
    says so; if not, a line says why, once.
    """
    comm, recorder = current.comm, current.recorder
    if current.is_new:
        _add_sinks(current, sinks)
    if comm.rank == 0:
        recorder.add_watcher(MonitorThread(Monitor(gpu_identity(current.worker.device)).sample, recorder.event))
        observe = current.run.config.observe
        if observe.watch_every_s and observe.timeline != "off":
            run, every_s = current.layout.folder, observe.watch_every_s
            recorder.add_watcher(VerdictWatch(run, every_s, recorder.say, recorder.event, recorder.show))
    window = Window(*broadcast_json(comm, [plan.window.first, plan.window.last], name="timeline"))
    if window:
        horovod = comm if comm.rank == 0 and isinstance(comm, TimelineComm) else None
        folder = current.layout.timeline.folder
        recorder.add_watcher(HorovodTimeline(comm, horovod, window, folder, recorder.warn))
    elif plan.reason and comm.size > 1 and current.is_new:
        how = f"; to record it nevertheless: {ASK}" if plan.kind == "spans" else ""
        recorder.say(f"Horovod's Timeline: {plan}{how}")


def add_stamps(current: Round) -> tuple[int, StepStamps | None]:
    """Measure clocks and link, then collect every rank's stamps of the steps to come. Collective: yes.

    Measuring the link delays all ranks. In an elastic job, rank 0's measurement from an earlier round, of equally many
    ranks on the same hosts, still counts.

    Returns the number of this start, counted from 0 over the starts with stamps; and the collector, which needs a final
    `finish`, or None if there is no step to do.
    """
    if current.run.config.observe.timeline == "off":
        return 0, None
    worker, comm, recorder = current.worker, current.comm, current.recorder
    path, started_at = current.layout.timeline.steps, worker.state.progress.step
    gpu = gpu_identity(worker.device)
    device = (gpu.uuid or gpu.pci_bus_id) if gpu is not None else ""
    mine = [socket.gethostname(), clock_id(), time.perf_counter_ns() / 1e3, device]
    hosts, ids, now_us, devices = zip(*allgather_json(comm, mine, name="timeline/clocks"), strict=True)
    facts = (starts_so_far(path), worker.links.get(hosts)) if comm.rank == 0 else None
    start, measured = broadcast_json(comm, facts, name="timeline/start")
    if started_at >= current.stop:
        return start, None
    clocks = Clocks(comm, ids)
    clocks.probe(AT_START)
    limit_s = _LINK_S if len(set(hosts)) == 1 else _NETWORK_S
    link = measured if measured is not None else probe_link(comm, worker.device, limit_s) if comm.size > 1 else []
    worker.links[hosts] = link
    writer = None
    if comm.rank == 0:
        origin_us = time.perf_counter_ns() / 1e3
        sink = StepFile(path, recorder.warn, clocks, origin_us, recorder.show)
        line = StartLine(VERSION, start, comm.size, started_at, list(hosts), list(ids), origin_us, link)
        stages = worker.plan.dimensions.pp
        sink.start(msgspec.structs.replace(line, devices=list(devices), consecutive_stages=stages), now_us)
        writer = Background(lambda: sink, path.name, recorder.warn)
    causes = HostLoad(Monitor(gpu).device)
    for name in ASIDE:
        current.spans.listeners_to.setdefault(name, []).append(causes)
    stamps = StepStamps(comm, current.spans, clocks, causes, started_at, current.stop, writer)
    recorder.add_watcher(stamps)
    return start, stamps


_EXPORTERS = {"prometheus": "prometheus_client", "otlp": "opentelemetry.exporter.otlp.proto.http"}
"""Modules of `observe` with a sink of `observe.metrics`, which are their option and their extra, and their library."""


def _add_exporter(current: Round, name: str, to: Any) -> None:
    """Add such a sink on rank 0. Collective: yes. Errors, on every rank: HvdtrainError, such as for a port in use."""

    def add() -> None:
        import_library(_EXPORTERS[name], f"--observe.{name}", name)
        module = import_module(f"hvdtrain.observe.{name}")
        sink = module.open_sink(to, current.layout.folder.name, rank_label(current.worker.info))
        current.recorder.add_sink(lambda: sink, name)

    on_rank_0(current.comm, add, name=f"sinks/{name}")


def _add_sinks(current: Round, given: Sequence[Any]) -> None:
    """On rank 0, add the sinks that the options name, those of the calling program, and TensorBoard. Collective: yes.

    Errors: ConfigError: one of them cannot be found or is not a sink; on every rank. See `_add_exporter`.
    """
    recorder, layout, config, info = current.recorder, current.layout, current.run.config, current.worker.info
    wanted, leads = "a function of one record, or a class with write(record) and close()", current.comm.rank == 0
    specs = [config.observe.sinks] if isinstance(config.observe.sinks, str) else config.observe.sinks
    for spec in TRACKERS.keys() & set(specs):
        check_installed(spec)
        if leads:
            recorder.add_sink(partial(Tracker, spec, layout.folder, info.variables), spec)
    sinks = [(spec, load(spec, ConfigError, wanted, info.folder)) for spec in specs if spec not in TRACKERS]
    sinks += [(getattr(value, "__name__", type(value).__name__), value) for value in given]
    for name, value in sinks:
        make = sink_maker(value)
        if leads:
            recorder.add_sink(make, name)
    for option in _EXPORTERS:
        if (to := getattr(config.observe, option)) is not None:
            _add_exporter(current, option, to)
    if not leads:
        return
    due = (current.stop, config.train.eval_every or config.checkpoint.every, config.checkpoint.every)
    round_steps = 1 if (outer := current.worker.plan.outer) is None else outer.every
    recorder.add_sink(partial(Promise, *due, recorder.say, recorder.event, round_steps=round_steps), "promise")
    if config.observe.tensorboard and is_installed():
        gpu = current.worker.device.type == "cuda"
        recorder.add_sink(partial(TensorBoard, layout.tensorboard, layout.journal, gpu=gpu), "TensorBoard")
    elif config.observe.tensorboard:
        recorder.warn('TensorBoard is not installed, so nothing is written for it: pip install "hvdtrain[tensorboard]"')


def add_listeners(spans: Spans, observe: ObserveConfig, device: torch.device, stack: ExitStack) -> None:
    """Add garbage collections, the device's own clock and Nsight Systems to `spans`, until `stack` ends."""
    stack.enter_context(spans.collections())
    if device.type != "cuda":
        if observe.nvtx:
            raise ConfigError("--observe.nvtx true, but there is no CUDA device for Nsight Systems to profile")
        return
    if observe.nvtx:
        spans.listeners.append(NvtxRanges())
    spans.listeners.append(DeviceSpans(spans))


def add_traces(current: Round, start: int) -> None:
    """Trace the steps that the options ask for: this rank's spans, and torch.profiler.

    `start` is the number of this start of the run.
    """
    observe, recorder, spans, comm = current.run.config.observe, current.recorder, current.spans, current.comm
    folder, started_at = current.layout.timeline.folder, current.worker.state.progress.step
    if observe.timeline == AUTO:
        window = Window(started_at + 1, started_at + _FIRST_STEPS)
    else:
        window = parse_window(observe.timeline, "observe.timeline", AUTO)
    if observe.timeline != "off":
        recorder.add_watcher(SpanTrace(spans, folder, comm.rank, socket.gethostname(), window, recorder.warn, start))
    profile = parse_window(observe.profile, "observe.profile")
    for option, asked in (("timeline", window), ("profile", profile)):
        if asked and started_at < current.stop < asked.first:
            recorder.warn(f"--observe.{option} begins at step {asked.first}, but the run ends at step {current.stop}")
    recorder.add_watcher(TorchProfile(spans, folder, comm.rank, profile, recorder.warn))
