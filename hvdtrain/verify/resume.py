"""Check that an interrupted run equals an uninterrupted one, on its number of ranks and on others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from hvdtrain.run_layout import RunLayout
from hvdtrain.verify.equality import Comparison, compare
from hvdtrain.verify.runs import Runner, scratch_config
from hvdtrain.yaml_file import yaml_text


def verify_resume(
    resolved: Mapping[str, Any], folder: Path, steps: int, sizes: Sequence[int], say: Callable[[str], None]
) -> Iterator[Comparison]:
    """Train with a config in `folder`, and compare.

    Args:
        resolved: the config, as `read_config` returns it.
        folder: an empty folder.
        steps: steps of each half.
        sizes: numbers of ranks; each is compared with the next.
        say: shows what is done.

    Errors:
        HvdtrainError: a job failed.
    """
    config = scratch_config(resolved, steps)
    file = RunLayout(folder).config
    file.write_text(yaml_text(config), encoding="utf-8")
    runner = Runner(folder, file, steps, say)
    precision = str(config.get("precision", "fp32"))
    wholes = {}
    for size in sizes:
        wholes[size] = runner.whole(f"whole-{size}", size)
        runner.half(f"half-{size}", size)
        rest = runner.rest(f"resumed-{size}", f"half-{size}", size, size)
        title = f"{steps} + {steps} on {size} rank(s) against {2 * steps}"
        yield compare(title, rest, wholes[size], exact=True, precision=precision)
    compression = config.get("parallel", {}).get("compression", "none")
    if compression != "none":
        if len(sizes) > 1:
            say(f"the error of {compression} depends on the number of ranks: no comparison across numbers of ranks")
        return
    for before, after in [pair for a, b in pairwise(sizes) for pair in ((a, b), (b, a))]:
        rest = runner.rest(f"resized-{before}-{after}", f"half-{before}", before, after)
        title = f"{steps} on {before} + {steps} on {after} against {2 * steps} on {before}"
        yield compare(title, rest, wholes[before], exact=False, precision=precision)
