"""A sink that sends the metrics of a run to a collector of OpenTelemetry, by its own library."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource

from hvdtrain.observe.metrics import METRICS, PREFIX, Metric, RunMetrics

EVERY_S = 10.0
_CLOSE_S = 5.0
_PATH = "/v1/metrics"
_UNITS = {"": "1", "ratio": "1", "seconds": "s", "bytes": "By", "joules": "J", "watts": "W", "hertz": "Hz",
          "celsius": "Cel"}  # fmt: skip


class Otlp:
    """Sends the metrics every ten seconds, and at the end, in a thread of the library, which logs what fails.

    `url` is that of the collector; without a path, ``/v1/metrics`` is added. `run` is an attribute of all metrics.
    """

    def __init__(self, url: str, run: str, every_s: float = EVERY_S) -> None:
        self._metrics, self._run = RunMetrics(), run
        endpoint = url if urlsplit(url).path.strip("/") else url.rstrip("/") + _PATH
        reader = PeriodicExportingMetricReader(OTLPMetricExporter(endpoint), export_interval_millis=1e3 * every_s)
        self._provider = MeterProvider([reader], Resource.create({"service.name": PREFIX}), shutdown_on_exit=False)
        meter = self._provider.get_meter(PREFIX)
        for metric in METRICS:
            make = meter.create_observable_counter if metric.counts else meter.create_observable_gauge
            read = partial(self._observe, metric)
            make(f"{PREFIX}.{metric.name}", [read], unit=_UNITS[metric.unit], description=metric.help)

    def write(self, record: Mapping[str, Any]) -> None:
        """Take the values of a record."""
        self._metrics.write(record)

    def close(self) -> None:
        """Send the last values."""
        self._provider.shutdown(timeout_millis=1e3 * _CLOSE_S)

    def _observe(self, metric: Metric, options: CallbackOptions) -> Iterable[Observation]:
        for labels, value in self._metrics.values(metric).items():
            if math.isfinite(value):  # the library takes no others
                yield Observation(value, {"run": self._run, **dict(zip(metric.labels, labels, strict=True))})


def open_sink(to: str, run: str, rank: str) -> Otlp:
    """Return the sink; `rank` is not used."""
    return Otlp(to, run)
