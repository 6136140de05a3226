"""Write the tables and the plot of the exchange from a file of results: ``python benchmarks/render.py FILE``.

The tables replace the text between two marks: the whole one in docs/figures.md, a short one in README.md. The plot
replaces `PLOT`. It needs matplotlib, which nothing else needs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLOT = ROOT / "docs" / "exchange.svg"
BEGIN, END = "<!-- from benchmarks/render.py -->\n", "<!-- to here -->\n"

ONE_HOST = {"default, 6.8M": "", "Llama 15M": "/llama15m", "Llama 60M, 16 tokens a rank": "/comm_heavy"}
RATES = {
    "Llama 15M, two hosts, no limit": "unthrottled",
    "Llama 15M, two hosts, 1 Gbit/s": "1gbit",
    "Llama 15M, two hosts, 100 Mbit/s": "100mbit",
}
CONTENDERS = {
    "hvdtrain": ("step/no_exchange{}", "none"),
    "hvdtrain, fp16": (None, "fp16"),
    "hvdtrain, int8": (None, "int8"),
    "hvdtrain, top-k 1%": (None, "topk"),
    "hvdtrain, PowerSGD rank 4": (None, "powersgd"),
    "DDP over Gloo": ("step/ddp_over_no_exchange{}", "ddp"),
    "DDP, its fp16 hook": (None, "ddp_fp16"),
    "DDP, its PowerSGD hook": (None, "ddp_powersgd"),
    "stock Horovod": ("step/stock_horovod_over_no_exchange{}", "stock_horovod"),
    "stock Horovod, fp16": (None, "stock_horovod_fp16"),
}
"""The names of the figures on one host and on two."""

SHORT_ROWS = ("hvdtrain", "hvdtrain, fp16", "hvdtrain, int8", "DDP over Gloo", "DDP, its fp16 hook", "stock Horovod")
SHORT_COLUMNS = ("Llama 60M, 16 tokens a rank", "Llama 15M, two hosts, 1 Gbit/s", "Llama 15M, two hosts, 100 Mbit/s")

Results = Mapping[str, Mapping[str, float]]


def read(file: Path) -> Results:
    return {result["name"]: result for result in json.loads(file.read_text())["results"]}


def table(
    results: Results,
    rows: Collection[str] = CONTENDERS,
    columns: Collection[str] = (*ONE_HOST, *RATES),
) -> str:
    """Return a Markdown table: for each contender, its step over the same step without exchange."""
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name in rows:
        alone, between = CONTENDERS[name]
        figures = {column: alone.format(suffix) if alone else "" for column, suffix in ONE_HOST.items()}
        figures |= {column: f"two_hosts/{rate}/{between}" for column, rate in RATES.items()}
        lines.append(f"| {name} | {' | '.join(_cell(results, figures[column]) for column in columns)} |")
    return "\n".join(lines) + "\n"


def pages(results: Results) -> dict[Path, str]:
    return {ROOT / "README.md": table(results, SHORT_ROWS, SHORT_COLUMNS), ROOT / "docs/figures.md": table(results)}


def _cell(results: Results, name: str) -> str:
    if name not in results:
        return ""
    figure = results[name]
    return f"{figure['value']:.2f} [{figure['low']:.2f} .. {figure['high']:.2f}]"


def draw(results: Results, file: Path) -> None:
    """Bars: a step between two hosts at 1 Gbit/s over the same step without exchange."""
    from common import pyplot

    named = {name: results[f"two_hosts/1gbit/{between}"] for name, (_, between) in CONTENDERS.items()}
    order = sorted(named, key=lambda name: named[name]["value"], reverse=True)
    values = [named[name]["value"] for name in order]
    below = [named[name]["value"] - named[name]["low"] for name in order]
    above = [named[name]["high"] - named[name]["value"] for name in order]
    figure, axes = pyplot("exchange").subplots(figsize=(8, 3.6), layout="constrained")
    colours = ["#2f81f7" if name.startswith("hvdtrain") else "#a0a0a0" for name in order]
    axes.barh(order, values, xerr=[below, above], color=colours, ecolor="#808080", height=0.7)
    for place, (value, high) in enumerate(zip(values, above, strict=True)):
        axes.text(value + high + 0.03, place, f"{value:.2f}", va="center")
    axes.axvline(1.0, color="#808080", linestyle="--", linewidth=1)
    axes.set_xlabel("time of a step at 1 Gbit/s / of the same step without exchange (1.00: communication is free)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, transparent=True, metadata={"Date": None})


def main() -> None:
    results = read(Path(sys.argv[1]))
    for page, text in pages(results).items():
        before, _, rest = page.read_text().partition(BEGIN)
        page.write_text(f"{before}{BEGIN}{text}{END}{rest.partition(END)[2]}")
    draw(results, PLOT)


if __name__ == "__main__":
    main()
