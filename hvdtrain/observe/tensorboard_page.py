"""What TensorBoard shows beside plain scalars: the page of charts, the config as text, hyperparameters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hvdtrain.yaml_file import flatten

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary

STACK_FROM, STACK_TO = "step_stacked_ms/from", "step_stacked_ms/to"
"""Tags of the edges of a band."""

STACK_TITLE = "where a step's time goes (ms, stacked)"

RANKS_TITLE = "the last rank after the last but one, and exposed communication (ms a step)"

METRICS = ("loss/train", "loss/heldout")
"""Tags whose last value stands beside a run's hyperparameters."""

Charts = dict[str, list[str]]


def _categories(unit: str, *, gpu: bool, several: bool, flops: bool, peak: bool) -> dict[str, Charts]:
    """Titles of charts, and the tags that each draws, by category."""
    overview = {
        "loss": ["loss/train", "loss/heldout"],
        f"{unit} per second": [f"speed/{unit}_per_s"],
        "exposed communication (% of a step)": ["communication/exposed_percent"],
    }
    if several:
        overview[RANKS_TITLE] = ["straggler/cost_ms", "straggler/exposed_ms"]
    training = {
        "loss by samples": ["loss_by_samples/train", "loss_by_samples/heldout"],
        "loss by seconds of training": ["loss_by_seconds/train", "loss_by_seconds/heldout"],
        "learning rate": ["optimizer/learning_rate"],
        "gradient norm": ["optimizer/gradient_norm"],
    }
    compute = {}
    if flops:
        compute["TFLOP/s"] = ["speed/tflops_per_s"]
    if peak:
        compute["FLOPs utilisation (%)"] = ["speed/flops_utilisation_percent"]
    if gpu:
        compute["GPU (%)"] = ["machine/gpu_percent"]
        compute["GPU clock (MHz)"] = ["machine/gpu_clock_mhz"]
        compute["GPU temperature (°C)"] = ["machine/gpu_temperature_c"]
        compute["GPU power (W)"] = ["machine/gpu_power_w"]
    compute["host CPU (%)"] = ["machine/host_cpu_percent"]
    compute["memory (GiB)"] = ["memory/process_gib", "memory/host_used_gib"]
    if gpu:
        compute["memory (GiB)"] += [
            "memory/gpu_used_gib",
            "memory/cuda_allocated_peak_gib",
            "memory/cuda_reserved_peak_gib",
        ]
    return {"overview": overview, "training": training, "machine": compute}


def layout(unit: str, *, gpu: bool, several: bool, flops: bool, peak: bool) -> Summary:
    """The custom scalars page.

    TensorBoard has no stacked chart, but its margin chart fills between two series: with one run a band, each between
    the sum of the parts below it and that with its own, the bands lie on each other, each in its run's colour.

    Args:
        unit: what a step's `tokens` counts.
        gpu: whether the run has one.
        several: whether it has several ranks.
        flops: whether a sample's FLOPs are known.
        peak: whether the devices' peak is known too.
    """
    from tensorboard.plugins.custom_scalar import layout_pb2

    def chart(title: str, tags: list[str]) -> Any:
        exact = [f"^{re.escape(tag)}$" for tag in tags]
        return layout_pb2.Chart(title=title, multiline=layout_pb2.MultilineChartContent(tag=exact))

    categories = [
        layout_pb2.Category(title=title, chart=[chart(*item) for item in charts.items()])
        for title, charts in _categories(unit, gpu=gpu, several=several, flops=flops, peak=peak).items()
    ]
    band = layout_pb2.MarginChartContent.Series(value=STACK_TO, lower=STACK_FROM, upper=STACK_TO)
    stack = layout_pb2.MarginChartContent(series=[band])
    categories[0].chart.append(layout_pb2.Chart(title=STACK_TITLE, margin=stack))
    content = layout_pb2.Layout(category=categories).SerializeToString()
    return _tensor("custom_scalars__config__", "custom_scalars", content)


def text(tag: str, markdown: str) -> Summary:
    """Markdown for the text page."""
    from torch.utils.tensorboard import summary

    return summary.text(tag, markdown)  # type: ignore[no-untyped-call]


def _tensor(tag: str, plugin: str, content: bytes) -> Summary:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

    tensor = TensorProto(dtype="DT_STRING", string_val=[content], tensor_shape=TensorShapeProto())
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name=plugin))
    return Summary(value=[Summary.Value(tag=tag, tensor=tensor, metadata=metadata)])


def config_table(started: Mapping[str, Any]) -> str:
    """A markdown table of ranks, parameters and every option, from the record of the run's start."""
    rows = [(name, started[name]) for name in ("size", "parameters", "unit") if name in started]
    rows += flatten(started.get("config") or {}).items()
    lines = [f"| {name} | {_cell(value)} |" for name, value in rows]
    return "\n".join(["| option | value |", "|---|---|", *lines])


def _cell(value: Any) -> str:
    return "" if value is None else str(value).replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")


def findings(explained: Mapping[str, Any]) -> str:
    """Markdown of what the end of a run says: the verdict, and a table of findings."""
    lines = [f"**{_cell('; '.join(explained['verdict']))}.**", ""]
    if explained["findings"]:
        lines += ["| ms a step, at most | what | try |", "|---|---|---|"]
    for found in explained["findings"]:
        cost = "" if found["cost_ms"] is None else f"{found['cost_ms']:.3g}"
        lines.append(f"| {cost} | {_cell(found['text'])} | {_cell(found['advice'])} |")
    return "\n".join(lines)


def hyperparameters(config: Mapping[str, Any]) -> list[Summary]:
    """The run as a row of the HParams page; where the run lies and how it was resumed are left out."""
    from torch.utils.tensorboard import summary

    found = {name: v for name, v in flatten(config).items() if isinstance(v, (bool, int, float, str))}
    for name in ("run_dir", "resume", "log_level"):
        found.pop(name, None)
    experiment, start, _ = summary.hparams(found, dict.fromkeys(METRICS, 0.0))  # type: ignore[no-untyped-call]
    return [experiment, start]


def hyperparameters_end() -> Summary:
    """What marks a run of the HParams page as finished."""
    from torch.utils.tensorboard import summary

    _, _, end = summary.hparams({}, {})  # type: ignore[no-untyped-call]
    return end


def histogram_values(kind: str, found: Mapping[str, Any]) -> Summary:
    """Histograms by name, as `hvdtrain.observe.histograms.histogram` makes them, under ``kind/NAME``."""
    from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary

    values = [
        Summary.Value(
            tag=f"{kind}/{name}",
            histo=HistogramProto(
                min=h["min"],
                max=h["max"],
                num=h["num"],
                sum=h["sum"],
                sum_squares=h["sum_squares"],
                bucket_limit=h["limits"],
                bucket=h["counts"],
            ),
        )
        for name, h in found.items()
    ]
    return Summary(value=values)


def scalars(values: Mapping[str, float]) -> Summary:
    """All numbers of a point as one summary."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
