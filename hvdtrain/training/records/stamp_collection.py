"""Collect every rank's step stamps, the clock offsets and the link's speed."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import torch
from torch import nn

from hvdtrain.comm.base import Comm
from hvdtrain.comm.link_probe import probe_link
from hvdtrain.comm.objects import allgather_json, broadcast_json
from hvdtrain.config.schema import ObserveConfig
from hvdtrain.observe.clocks import AT_START, Clocks
from hvdtrain.observe.host_load import HostLoad
from hvdtrain.observe.monitor import Monitor, gpu_identity
from hvdtrain.observe.recorder import Recorder
from hvdtrain.observe.sinks import Background
from hvdtrain.observe.step_file import StepFile, starts_so_far
from hvdtrain.observe.step_format import VERSION, StartLine
from hvdtrain.observe.step_stamps import StepStamps
from hvdtrain.run_layout import TimelineLayout
from hvdtrain.runtime.clock import clock_id
from hvdtrain.spans import Spans
from hvdtrain.training.diagnostics.experts import find_routers

LINK_S = 0.08
"""Time limit for measuring the link at each start, in seconds."""

Links = dict[tuple[str, ...], list[tuple[int, float]]]
"""Bytes and seconds of all-reduces, by the hosts of the ranks."""


def add_stamps(
    recorder: Recorder,
    observe: ObserveConfig,
    spans: Spans,
    folder: Path,
    comm: Comm,
    model: nn.Module,
    device: torch.device,
    started_at: int,
    stop: int,
    links: Links,
) -> tuple[int, StepStamps | None]:
    """Measure clocks and link, then collect every rank's stamps of the steps from `started_at` to `stop`.

    Measuring the link delays all ranks. In an elastic job, rank 0's measurement from an earlier round, of equally many
    ranks on the same hosts, still counts. `links`: measurements that this process knows; extended. Collective: yes.

    Returns:
        The number of this start, counted from 0 over the starts with stamps; and the collector, which needs a final
        `finish`, or None if there is no step to do.
    """
    if observe.timeline == "off":
        return 0, None
    path = TimelineLayout(folder).steps
    mine = [socket.gethostname(), clock_id(), time.perf_counter_ns() / 1e3]
    hosts, ids, now_us = zip(*allgather_json(comm, mine, name="timeline/clocks"), strict=True)
    facts = (starts_so_far(path), links.get(hosts)) if comm.rank == 0 else None
    start, measured = broadcast_json(comm, facts, name="timeline/start")
    if started_at >= stop:
        return start, None
    clocks = Clocks(comm, ids)
    clocks.probe(AT_START)
    link = measured if measured is not None else probe_link(comm, device, LINK_S) if comm.size > 1 else []
    links[hosts] = link
    writer = None
    if comm.rank == 0:
        origin_us = time.perf_counter_ns() / 1e3
        sink = StepFile(path, recorder.warn, clocks, origin_us, recorder.show)
        line = StartLine(VERSION, start, comm.size, started_at, list(hosts), list(ids), origin_us, link)
        sink.start(line, now_us)
        writer = Background(lambda: sink, path.name, recorder.warn)
    causes = HostLoad(Monitor(gpu_identity(device)).device)
    stamps = StepStamps(comm, spans, clocks, causes, find_routers(model), started_at, writer)
    recorder.add_watcher(stamps)
    return start, stamps
