"""Stamps of every rank's steps, the clocks and the link, as a run's options ask for them."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from hvdtrain.comm.base import Comm
from hvdtrain.comm.link import probe
from hvdtrain.comm.objects import allgather_json, broadcast_json
from hvdtrain.config.schema import ObserveConfig
from hvdtrain.observe.causes import Causes
from hvdtrain.observe.clock_fit import Offset
from hvdtrain.observe.clocks import AT_START, Clocks
from hvdtrain.observe.monitor import Monitor, gpu_identity
from hvdtrain.observe.recorder import Recorder
from hvdtrain.observe.stamps import MOMENTS
from hvdtrain.observe.step_file import (
    NAME,
    StepFile,
    block_line,
    clock_fields,
    ranks_event,
    start_line,
    starts_so_far,
)
from hvdtrain.observe.step_stamps import StepStamps
from hvdtrain.runtime.clock import clock_id
from hvdtrain.spans import Spans

LINK_S = 0.08
"""Seconds that measuring the link may take at each start."""


class _Rank0:
    """Writes and shows what the ranks tell."""

    def __init__(self, file: StepFile, recorder: Recorder, clocks: Clocks, origin_us: float) -> None:
        self._file = file
        self._recorder = recorder
        self._clocks = clocks
        self._origin_us = origin_us

    def offsets(self, times_us: Sequence[float]) -> list[Offset]:
        return [self._clocks.offset(rank, us) for rank, us in enumerate(times_us)]

    def tell(self, first: int, stamps: NDArray[np.float64], facts: dict[str, list[float]]) -> None:
        ranks, steps, _ = stamps.shape
        offsets = self.offsets(stamps[:, -1, MOMENTS.index("end")].tolist())
        self._file.write(block_line(first, stamps, facts, offsets, self._origin_us))
        if ranks > 1:
            self._recorder.show(ranks_event(first + steps - 1, stamps, offsets))


def add_stamps(
    recorder: Recorder,
    observe: ObserveConfig,
    spans: Spans,
    folder: Path,
    comm: Comm,
    device: torch.device,
    started_at: int,
    stop: int,
) -> tuple[int, StepStamps | None]:
    """Gather every rank's stamps of the steps from `started_at` to `stop`; looks at clocks and link first.

    Collective: yes.

    Returns:
        Which start of the run this is, counted from 0 by those that left stamps; and what gathers them, whose last
        block is still to be asked for, None where there are none to be.
    """
    if observe.timeline == "off":
        return 0, None
    start = broadcast_json(comm, starts_so_far(folder / NAME) if comm.rank == 0 else 0, name="timeline/start")
    if started_at >= stop:
        return start, None
    mine = [socket.gethostname(), clock_id(), time.perf_counter_ns() / 1e3]
    hosts, ids, now_us = zip(*allgather_json(comm, mine, name="timeline/clocks"), strict=True)
    clocks = Clocks(comm, ids)
    clocks.probe(AT_START)
    link = probe(comm, device, LINK_S) if comm.size > 1 else []
    tell = None
    if comm.rank == 0:
        origin_us = time.perf_counter_ns() / 1e3
        file = StepFile(folder / NAME, recorder.warn)
        recorder.add_watcher(file)
        rank_0 = _Rank0(file, recorder, clocks, origin_us)
        line = start_line(start, started_at, hosts, ids, origin_us)
        file.write({**line, "link": link, "clock": clock_fields(rank_0.offsets(now_us))})
        tell = rank_0.tell
    causes = Causes(Monitor(gpu_identity(device)).device)
    stamps = StepStamps(comm, spans, clocks, causes, None, started_at, tell)
    recorder.add_watcher(stamps)
    return start, stamps
