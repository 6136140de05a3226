"""What a search has found: a table, a config file with evidence, and TensorBoard's HParams."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.run_layout import RunLayout
from hvdtrain.tune.study import options
from hvdtrain.yaml_file import yaml_text

if TYPE_CHECKING:
    from hvdtrain.tune.study import Tried


def table(tried: Sequence[Tried], measure: str) -> list[str]:
    """Return a line for each trial, the best first."""
    order = sorted(tried, key=lambda each: math.inf if each.value is None else each.value)
    return [f"{measure:>10}  options"] + [
        f"{'-' if each.value is None else format(each.value, '.5g'):>10}  {' '.join(options(each.values))}"
        + (f"  ({each.why})" if each.why else "")
        for each in order
    ]


def best_yaml(tried: Sequence[Tried], measure: str) -> str | None:
    """Return the config of the best trial, without its run folder, with all trials as comments; None if all failed."""
    known = [each for each in tried if each.value is not None]
    if not known:
        return None
    best = min(known, key=lambda each: float(each.value or 0.0))
    config = RunLayout(best.folder).read_config()
    config.pop("run_dir", None)
    lines = [f"# {line}" for line in (f"The best of {len(tried)} trials by {measure}; run: {best.folder}",
                                      *table(tried, measure))]  # fmt: skip
    return "\n".join(lines) + "\n" + yaml_text(config)


def write_hparams(tried: Sequence[Tried], folder: Path, measure: str) -> None:
    """Write the trials for TensorBoard's HParams, if TensorBoard is installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return
    with SummaryWriter(str(folder)) as writer:
        for each in tried:
            if each.value is not None:
                writer.add_hparams(dict(each.values), {measure: each.value}, run_name=each.folder.name)
