"""Collect every rank's step stamps, the clock offsets and the link's speed."""

from __future__ import annotations

import socket
import time

from hvdtrain.comm.link_probe import probe_link
from hvdtrain.comm.objects import allgather_json, broadcast_json
from hvdtrain.observe.clocks import AT_START, Clocks
from hvdtrain.observe.host_load import HostLoad
from hvdtrain.observe.monitor import Monitor, gpu_identity
from hvdtrain.observe.sinks import Background
from hvdtrain.observe.step_file import StepFile, starts_so_far
from hvdtrain.observe.step_format import VERSION, StartLine
from hvdtrain.observe.step_stamps import StepStamps
from hvdtrain.runtime.clock import clock_id
from hvdtrain.training.diagnostics.experts import find_routers
from hvdtrain.training.round import Round

LINK_S = 0.08
"""Time limit for measuring the link at each start, in seconds."""


def add_stamps(current: Round) -> tuple[int, StepStamps | None]:
    """Measure clocks and link, then collect every rank's stamps of the steps to come. Collective: yes.

    Measuring the link delays all ranks. In an elastic job, rank 0's measurement from an earlier round, of equally many
    ranks on the same hosts, still counts.

    Returns:
        The number of this start, counted from 0 over the starts with stamps; and the collector, which needs a final
        `finish`, or None if there is no step to do.
    """
    if current.run.config.observe.timeline == "off":
        return 0, None
    worker, comm, recorder = current.worker, current.comm, current.recorder
    path, started_at = current.layout.timeline.steps, worker.state.progress.step
    mine = [socket.gethostname(), clock_id(), time.perf_counter_ns() / 1e3]
    hosts, ids, now_us = zip(*allgather_json(comm, mine, name="timeline/clocks"), strict=True)
    facts = (starts_so_far(path), worker.links.get(hosts)) if comm.rank == 0 else None
    start, measured = broadcast_json(comm, facts, name="timeline/start")
    if started_at >= current.stop:
        return start, None
    clocks = Clocks(comm, ids)
    clocks.probe(AT_START)
    link = measured if measured is not None else probe_link(comm, worker.device, LINK_S) if comm.size > 1 else []
    worker.links[hosts] = link
    writer = None
    if comm.rank == 0:
        origin_us = time.perf_counter_ns() / 1e3
        sink = StepFile(path, recorder.warn, clocks, origin_us, recorder.show)
        line = StartLine(VERSION, start, comm.size, started_at, list(hosts), list(ids), origin_us, link)
        sink.start(line, now_us)
        writer = Background(lambda: sink, path.name, recorder.warn)
    causes = HostLoad(Monitor(gpu_identity(worker.device)).device)
    stamps = StepStamps(comm, current.spans, clocks, causes, find_routers(worker.state.model), started_at, writer)
    recorder.add_watcher(stamps)
    return start, stamps
