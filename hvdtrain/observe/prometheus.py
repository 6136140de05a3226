"""A sink for Prometheus: a port of this host that it reads, or a file for node_exporter's textfile collector."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server, write_to_textfile
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from hvdtrain.errors import HvdtrainError
from hvdtrain.observe.metrics import METRICS, PREFIX, RunMetrics

HOST = "127.0.0.1"
EVERY_S = 10.0
"""Least time between two writes of the file."""
_AFTER_ERROR_S = 60.0


class Prometheus:
    """Keeps the metrics of a run: for who reads the port `to` on `HOST`, or in the file `to`, both opened here.

    A thread of the port renders them. `run` is a label of all. Errors: OSError: the port is in use, or the file cannot
    be written.
    """

    def __init__(self, to: int | str, run: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics, self._run, self._clock = RunMetrics(), run, clock
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._file = to if isinstance(to, str) else ""
        self._server = start_http_server(to, HOST, self._registry)[0] if isinstance(to, int) else None
        if self._file:
            self._write_file()

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        for metric in METRICS:
            kind = CounterMetricFamily if metric.counts else GaugeMetricFamily
            family = kind(f"{PREFIX}_{metric.name}", metric.help, labels=("run", *metric.labels), unit=metric.unit)
            for labels, value in self._metrics.values(metric).items():
                family.add_metric((self._run, *labels), value)
            if family.samples:
                yield family

    def write(self, record: Mapping[str, Any]) -> None:
        """Take the values of a record; write the file if it is time to. Errors: OSError."""
        self._metrics.write(record)
        if self._file and self._clock() >= self._due_s:
            self._write_file()

    def close(self) -> None:
        """Close the port; write the file for the last time. Errors: OSError."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        else:
            self._write_file()

    def _write_file(self) -> None:
        self._due_s = self._clock() + _AFTER_ERROR_S  # a sink that fails often gets no records for a time
        write_to_textfile(self._file, self._registry)
        self._due_s = self._clock() + EVERY_S


def open_sink(to: int | str, run: str, rank: str) -> Prometheus:
    """Return the sink. `rank` names this process in the error. Errors: HvdtrainError."""
    try:
        return Prometheus(to, run)
    except OSError as error:
        why = f"cannot listen on {HOST}" if isinstance(to, int) else "cannot write this file"
        raise HvdtrainError(
            f"--observe.prometheus {to}: {rank} {why}: {error.strerror or error}",
            next_step="another port for each job on a host, or a file in a folder that exists there",
        ) from error
