"""Whether a run that is interrupted equals one that is not, on its number of ranks and on others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from hvdtrain.run_layout import RunLayout
from hvdtrain.verify.equality import Compared, compare
from hvdtrain.verify.runs import Runner, scratch_config
from hvdtrain.yaml_file import yaml_text


def verify_resume(
    resolved: Mapping[str, Any], folder: Path, steps: int, sizes: Sequence[int], say: Callable[[str], None]
) -> Iterator[Compared]:
    """Train by the config of a run in `folder`, and compare.

    Args:
        resolved: the config, as `read_config` gives it.
        folder: an empty one.
        steps: of each half.
        sizes: numbers of ranks, each beside the next one.
        say: told of what is done.

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
        what = f"{steps} + {steps} on {size} rank(s) against {2 * steps}"
        yield compare(what, rest, wholes[size], exact=True, precision=precision)
    compression = config.get("parallel", {}).get("compression", "none")
    if compression != "none":
        if len(sizes) > 1:
            say(f"what {compression} loses depends on the number of ranks: curves across sizes are not compared")
        return
    for before, after in [pair for a, b in pairwise(sizes) for pair in ((a, b), (b, a))]:
        rest = runner.rest(f"resized-{before}-{after}", f"half-{before}", before, after)
        what = f"{steps} on {before} + {steps} on {after} against {2 * steps} on {before}"
        yield compare(what, rest, wholes[before], exact=False, precision=precision)
