"""Metrics of a run for Prometheus and OpenTelemetry, read by their own libraries."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from prometheus_client.parser import text_string_to_metric_families

import hvdtrain
from hvdtrain.observe import prometheus
from hvdtrain.observe.metrics import METRICS, RunMetrics
from hvdtrain.observe.otlp import Otlp
from hvdtrain.observe.past_journal import read_steps
from hvdtrain.observe.prometheus import Prometheus
from tests.support.host import required_tool
from tests.support.launch import ROOT, TIMEOUT_S, training
from tests.support.thread_job import train_on_threads
from tests.support.toy import toy
from tests.support.web_server import posts

JOB = ("--task", "tests/support/toy.py:toy", "--train.steps", "40", "--checkpoint.every", "0", "--run_dir", "run")
STEP = {"step": 1, "time": 9.0, "loss": 2.0, "lr": 0.1, "grad_norm": math.nan, "tokens": 8.0, "step_s": 0.5}
RANKS = {"event": "ranks", "first_step": 1, "at_step": 16, "late_ms": [0.0, 4.0], "exposed_ms": [1.0, 2.0],
         "wait_ms": [4.0, 0.0], "hosts": ["a", "b"], "facts": {"gpu_clock_mhz": [1980.0, 1110.0],
         "gpu_temperature_c": [60.0, 83.0], "gpu_throttle": [0.0, 32.0]}}  # fmt: skip
RECORDS = (
    {"event": "started", "size": 2, "unit": "tokens"},
    {**STEP, "forward_s": 0.2, "skipped": True},
    {"event": "not_finite", "at_step": 1},
    {"event": "machine", "gpu_percent": 90, "gpu_power_w": 650.0, "gpu_memory_used_bytes": 8},
    {"event": "energy", "joules": {"GPUs": 70.0}},
    RANKS,
    {"event": "look", "verdicts": {"rank 1": "rank 1 is slow"}, "goodput": 0.75},
    {"event": "evaluation", "loss": 1.5},
)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)


def free_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return int(unused.getsockname()[1])


def samples(text: str) -> dict[str, float]:
    """Values by name, and labels besides the run's."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [f"{name}={value}" for name, value in sorted(sample.labels.items()) if name != "run"]
            found[" ".join([sample.name.removeprefix("hvdtrain_"), *labels])] = sample.value
    return found


def test_a_file_has_what_the_journal_says(tmp_path: Path) -> None:
    train_on_threads(*JOB, "--observe.prometheus", "job.prom", size=2)
    found, steps = samples(Path("job.prom").read_text()), read_steps(Path("run/journal.jsonl"))
    assert (found["step"], found["steps_total"], found["ranks"]) == (40, 40, 2)
    assert found["loss"] == steps[40]["loss"]
    for name, key in (("tokens", "tokens"), ("step_time_seconds", "step_s"), ("part_time_seconds", "backward_s")):
        part = " part=backward" if name.startswith("part") else ""
        assert found[f"{name}_total{part}"] == pytest.approx(sum(step[key] for step in steps.values()))
    waits = [value for name, value in found.items() if name.startswith("wait_seconds_total host=")]
    assert len(waits) == 2 and 0 < sum(waits) < found["step_time_seconds_total"]
    assert 0 < found["goodput_ratio"] < 1 and found["alarms_total event=not_finite"] == 0
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith("job.prom.")]


def test_each_record_gives_its_values() -> None:
    metrics = RunMetrics()
    for record in RECORDS:
        metrics.write(record)
    values = {metric.name: metrics.values(metric) for metric in METRICS}
    assert all(values.values()), "each metric has a value"
    rank_1 = ("1", "b")
    expected = {"exposed": 0.032, "wait": 0.0, "late": 0.004, "gpu_clock": 1.11e9, "gpu_throttled": 32.0}
    assert {name: values[name][rank_1] for name in expected} == pytest.approx(expected)
    assert values["gpu_usage"] == {(): 0.9} and values["energy"] == {("GPUs",): 70.0}
    assert values["slow"] == {("rank 1",): 1.0} and values["alarms"]["not_finite",] == 1.0


def test_counters_of_ranks_grow_in_each_step() -> None:
    """Else a rate over less than the time between two blocks is 0, or several times too high."""
    metrics, exposed = RunMetrics(), next(metric for metric in METRICS if metric.name == "exposed")
    rank_1, seen = ("1", "b"), []
    metrics.write(RANKS)
    for _ in range(3):
        metrics.write(STEP)
        seen.append(metrics.values(exposed)[rank_1])
    assert seen == pytest.approx([0.034, 0.036, 0.038])
    metrics.write({**RANKS, "first_step": 33, "at_step": 48, "exposed_ms": [1.0, 5.0]})
    assert metrics.values(exposed)[rank_1] == pytest.approx(0.038)
    metrics.write(STEP)
    assert metrics.values(exposed)[rank_1] == pytest.approx(0.043)
    metrics.write({**RANKS, "first_step": 101, "at_step": 116, "hosts": ["b", "a"]})  # another round
    assert metrics.values(exposed) == pytest.approx({("0", "b"): 0.016, ("1", "a"): 0.032})


def test_a_port_is_read_while_the_run_lives_and_is_closed_then() -> None:
    port = free_port()
    sink = Prometheus(port, "name")
    sink.write(RECORDS[1])
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    assert 'hvdtrain_tokens_total{run="name"} 8.0' in text and samples(text)["tokens_total"] == 8
    sink.close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60)


def test_a_file_is_written_at_times_and_a_full_disk_does_not_lose_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    sink = Prometheus("job.prom", "name", lambda: now_s[0])
    file = Path("job.prom")
    for at_s, written in ((1.0, 0), (prometheus.EVERY_S, 2), (prometheus.EVERY_S + 1, 2)):
        now_s[0] = at_s
        sink.write(RECORDS[1])
        assert samples(file.read_text()).get("steps_total", 0) == written
    whole = prometheus.write_to_textfile
    monkeypatch.setattr(prometheus, "write_to_textfile", lambda *given: (_ for _ in ()).throw(OSError("full")))
    for at_s, fails in ((20.0, True), (40.0, False)):
        now_s[0] = at_s
        with pytest.raises(OSError, match="full") if fails else ExitStack():
            sink.write(RECORDS[1])
    monkeypatch.setattr(prometheus, "write_to_textfile", whole)
    sink.close()
    assert samples(file.read_text())["steps_total"] == 5


@pytest.mark.parametrize("wrong", ["port", "folder", "library"])
def test_what_cannot_work_ends_the_run_before_its_first_step(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    with ExitStack() as stack:
        to: Any = port
        if wrong == "port":
            stack.callback(Prometheus(port, "other").close)
            said = r"rank 0/2 on \S* ?cannot listen on 127.0.0.1: Address already in use\n  next: another port"
        elif wrong == "folder":
            to, said = "none/job.prom", r"rank 0/2 on \S* ?cannot write this file: No such file"
        else:
            monkeypatch.setattr("hvdtrain.task.base.import_module", lambda name: import_module("no_such_library"))
            said = r'needs the prometheus_client library\n  next: pip install "hvdtrain\[prometheus\]"'
        with pytest.raises(hvdtrain.HvdtrainError, match=said):
            train_on_threads(*JOB, "--observe.prometheus", str(to), size=2)
    assert not read_steps(Path("run/journal.jsonl"))


@pytest.mark.parametrize(
    "option",
    [
        *("prometheus 0", "prometheus 65536", "prometheus job.txt"),
        *("otlp collector:4318", "otlp http://:4318", "otlp http://[bad", "otlp http://collector:99999"),
    ],
)
def test_wrong_values_are_refused(option: str) -> None:
    name, value = option.split()
    with pytest.raises(hvdtrain.HvdtrainError, match=f"--observe.{name} is .* out of range"):
        hvdtrain.train({"observe": {name: int(value) if value.isdigit() else value}}, toy)


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    """A collector of OpenTelemetry: its URL, and what it has received."""
    with posts(
        lambda request, body: (
            request.path,
            request.headers["Content-Type"],
            ExportMetricsServiceRequest.FromString(body),
        )
    ) as found:
        yield found


def test_a_collector_of_opentelemetry_gets_the_same(collector: tuple[str, list[Any]]) -> None:
    url, received = collector
    sink = Otlp(url, "name")
    for record in RECORDS:
        sink.write(record)
    sink.close()
    path, kind, message = received[-1]
    assert (path, kind) == ("/v1/metrics", "application/x-protobuf")
    (resource,) = message.resource_metrics
    assert ("service.name", "hvdtrain") in {
        (each.key, each.value.string_value) for each in resource.resource.attributes
    }
    found = {metric.name: metric for metric in resource.scope_metrics[0].metrics}
    names = {f"hvdtrain.{metric.name}" for metric in METRICS}
    assert names - {"hvdtrain.gradient_norm"} == found.keys(), "OpenTelemetry has only finite values"
    exposed = found["hvdtrain.exposed"]
    assert exposed.unit == "s" and exposed.sum.is_monotonic
    points = {tuple(each.value.string_value for each in p.attributes): p.as_double for p in exposed.sum.data_points}
    assert points == pytest.approx({("name", "0", "a"): 0.016, ("name", "1", "b"): 0.032})
    assert found["hvdtrain.loss"].gauge.data_points[0].as_double == 2.0


TASK = """
import os, time
from dataclasses import replace
from pathlib import Path
import hvdtrain
from hvdtrain.observe.monitor import Monitor
from tests.support.toy import toy

GPU = {"gpu_percent": 90, "gpu_clock_mhz": 1980.0, "gpu_temperature_c": 60, "gpu_power_w": 650.0, "gpu_throttle": []}
Monitor.device = lambda self: GPU

def slow_toy():
    task = toy()
    def loss(model, batch):
        time.sleep(0.01 + 0.03 * (os.environ["OMPI_COMM_WORLD_RANK"] == "1"))
        return task.loss(model, batch)
    return replace(task, loss=loss)

class Until(hvdtrain.Callback):
    def on_step(self, training, record):
        if Path("enough").exists():
            training.stop("enough")
"""
CONFIG = """
global: {{scrape_interval: 1s}}
scrape_configs: [{{job_name: hvdtrain, static_configs: [{{targets: ["127.0.0.1:{port}"]}}]}}]
"""


@pytest.mark.slow
def test_each_panel_of_the_dashboard_has_data_of_a_real_run(tmp_path: Path) -> None:
    program, port, own = required_tool("prometheus", "prometheus"), free_port(), free_port()
    (tmp_path / "job.py").write_text(TASK)
    (tmp_path / "prometheus.yml").write_text(CONFIG.format(port=port))
    argv = [
        program,
        "--config.file=prometheus.yml",
        "--storage.tsdb.path=data",
        f"--web.listen-address=127.0.0.1:{own}",
    ]
    panels = json.loads((ROOT / "docs" / "grafana.json").read_text())["panels"]
    exprs = [target["expr"] for panel in panels for target in panel["targets"]]

    def has_data(expr: str) -> bool:
        query = expr.replace("$run", ".*").replace("$__rate_interval", "10s")
        url = f"http://127.0.0.1:{own}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            return bool(json.load(answer)["data"]["result"])

    job_options = [*JOB[2:], "--task", "job.py:slow_toy", "--callbacks", "job.py:Until", "--train.steps", "100000"]
    observed = ("--observe.prometheus", str(port), "--observe.watch_every_s", "5")
    with subprocess.Popen(argv, cwd=tmp_path, stderr=subprocess.DEVNULL) as server:
        try:
            with training(*job_options, *observed, size=2, cwd=tmp_path) as job:
                lacking, end_s = exprs, time.monotonic() + TIMEOUT_S / 2
                while lacking and time.monotonic() < end_s and job.poll() is None:
                    with suppress(OSError):  # it has not started yet
                        lacking = [expr for expr in lacking if not has_data(expr)]
                    time.sleep(1)
                (tmp_path / "enough").touch()
                assert job.stdout is not None
                output = job.stdout.read()
        finally:
            server.terminate()
    assert not lacking and job.returncode == 0, output
