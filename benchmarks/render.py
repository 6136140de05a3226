"""The README's table and plot of the exchange, from a file of results: ``python benchmarks/render.py FILE``.

The table takes the place of what stands between two marks in README.md; the plot (drawn by matplotlib, which nothing
else needs) that of `PLOT`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
README, PLOT = ROOT / "README.md", ROOT / "docs" / "exchange.svg"
BEGIN, END = "<!-- from benchmarks/render.py -->\n", "<!-- to here -->\n"

ONE_HOST = {"default, 6.8M": "", "Llama, 15M": "/llama15m", "Llama, 60M, 16 tokens": "/comm_heavy"}
RATES = {"two hosts, no limit": "unthrottled", "1 Gbit/s": "1gbit", "100 Mbit/s": "100mbit"}
CONTENDERS = {
    "ours": ("step/no_exchange{}", "none"),
    "ours, fp16": (None, "fp16"),
    "ours, int8": (None, "int8"),
    "ours, top-k 1%": (None, "topk"),
    "ours, PowerSGD rank 4": (None, "powersgd"),
    "DDP over Gloo": ("step/ddp_over_no_exchange{}", "ddp"),
    "DDP, its fp16 hook": (None, "ddp_fp16"),
    "DDP, its PowerSGD hook": (None, "ddp_powersgd"),
    "stock Horovod": ("step/stock_horovod_over_no_exchange{}", "stock_horovod"),
    "stock Horovod, fp16": (None, "stock_horovod_fp16"),
}
"""How each is called in the figures of one host and of two."""

Results = Mapping[str, Mapping[str, float]]


def read(file: Path) -> Results:
    """Figures by name."""
    return {result["name"]: result for result in json.loads(file.read_text())["results"]}


def table(results: Results) -> str:
    """Of each contender, its step over the same step without exchange."""
    columns = [*ONE_HOST, *RATES]
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, (alone, between) in CONTENDERS.items():
        own = [alone.format(suffix) if alone else "" for suffix in ONE_HOST.values()]
        own += [f"two_hosts/{rate}/{between}" for rate in RATES.values()]
        lines.append(f"| {name} | {' | '.join(_cell(results, figure) for figure in own)} |")
    return "\n".join(lines) + "\n"


def _cell(results: Results, name: str) -> str:
    if name not in results:
        return ""
    figure = results[name]
    return f"{figure['value']:.2f} [{figure['low']:.2f} .. {figure['high']:.2f}]"


def draw(results: Results, file: Path) -> None:
    """Bars: a step between two hosts at 1 Gbit/s over the same step without exchange."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    named = {name: results[f"two_hosts/1gbit/{between}"] for name, (_, between) in CONTENDERS.items()}
    order = sorted(named, key=lambda name: named[name]["value"], reverse=True)
    values = [named[name]["value"] for name in order]
    below = [named[name]["value"] - named[name]["low"] for name in order]
    above = [named[name]["high"] - named[name]["value"] for name in order]
    # Grey that is read on white and on black; text stays text.
    pyplot.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "exchange", "font.size": 10})
    for part in ("text.color", "axes.edgecolor", "xtick.color", "ytick.color", "axes.labelcolor"):
        pyplot.rcParams[part] = "#808080"
    figure, axes = pyplot.subplots(figsize=(8, 3.6), layout="constrained")
    colours = ["#2f81f7" if name.startswith("ours") else "#a0a0a0" for name in order]
    axes.barh(order, values, xerr=[below, above], color=colours, ecolor="#808080", height=0.7)
    for place, (value, high) in enumerate(zip(values, above, strict=True)):
        axes.text(value + high + 0.03, place, f"{value:.2f}", va="center")
    axes.axvline(1.0, color="#808080", linestyle="--", linewidth=1)
    axes.set_xlabel("a step at 1 Gbit/s / the same step without exchange (1: an exchange that costs nothing)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, transparent=True, metadata={"Date": None})


def main() -> None:
    """Write both."""
    results = read(Path(sys.argv[1]))
    before, _, rest = README.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(f"{before}{BEGIN}{table(results)}{END}{after}")
    draw(results, PLOT)


if __name__ == "__main__":
    main()
